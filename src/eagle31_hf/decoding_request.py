"""What a generation of our own loop is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .conversation import TurnEnd, TurnStart
from .processing import ScoreProcessing
from .sequences import Sequences
from .stats import SpeculationStats
from .topology import StaticTopology


@dataclass(frozen=True)
class DraftShape:
    """What to draft in a round: `depth` levels of `top_k` children, `size` nodes with root; `top_k` 1 is a chain, ended
    early once the drafter is less sure of it than `floor`. Depth 0 drafts nothing."""

    depth: int
    floor: float = 0.0
    top_k: int = 1
    size: int = 0
    static: StaticTopology | None = None

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1 or self.static is not None

    @property
    def nodes(self) -> int:
        """Most nodes a verification forward has."""
        if self.static is not None:
            return self.static.size
        return self.depth + 1 if self.top_k == 1 else self.size

    @property
    def draft_block(self) -> int:
        """Most draft positions the drafter steps over in a round."""
        return max(1, self.depth * self.top_k, self.nodes)

    def reduced_to(self, depth: int, *, is_tree: bool) -> DraftShape:
        """This shape with no more than `depth` levels; a chain of them unless it may stay a tree."""
        if is_tree and depth == self.depth:
            return self
        return replace(self, depth=min(depth, self.depth), top_k=1, size=0, static=None)


@dataclass
class DecodingRequest:
    """Everything one generation needs beside the models.

    Attributes:
        sequences: prompts and stopping rules.
        processing: logits processors.
        shape: what to draft.
        do_sample: sample from the target's distribution instead of taking its arg-max.
        prefill_chunk: prompt columns per target forward; `None` for all at once.
        on_tokens: called with `(row, tokens)` as they are written (streaming).
        keep_scores, keep_logits: collect processed / raw scores of every written token.
        start: what the caches hold already.
        end: takes the caches of rows that have ended; `None` if nobody wants them.
    """

    sequences: Sequences
    processing: ScoreProcessing
    shape: DraftShape
    do_sample: bool = False
    prefill_chunk: int | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    start: TurnStart = field(default_factory=TurnStart)
    end: TurnEnd | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
