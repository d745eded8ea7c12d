"""A round: draft, verify, accept, commit. What a decoder needs of it, and nothing about how it is computed.

`EagerRound` and `CompiledRound` are the two ways; a decoder may change from one to the other between rounds, since all
that outlives a round is in its `PairCaches`. Whoever wants to look into rounds or change one step (benchmarks, tests)
puts a `RoundWrapper` around them: see `SpeculativeDecoder`'s `make_round`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..drafting.plan import DraftPlan
from ..sampling.acceptance import Acceptance
from ..target.binding import TargetOutput
from ..trees.draft_tree import DraftTree
from ..trees.host_numbers import on_device
from .pair_caches import PairCaches

# Processed scores (V,) of a node, by (row of the caches, node); or of all nodes, (B, N, V).
NodeScores = Tensor | Mapping[tuple[int, int], Tensor]


class Texts(Protocol):
    """The texts that rounds write, as far as rounds look into them."""

    @property
    def new(self) -> Sequence[Sequence[int]]:
        """New tokens of each text."""

    @property
    def device(self) -> torch.device:
        """Where their tokens belong."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end texts, behind which no drafts are wanted."""

    def last_token(self, row: int) -> int:
        """Of a text, its prompt's last one if nothing was written."""

    def remaining_tokens(self, row: int) -> int:
        """Tokens a text may still get."""

    def prefix(self, row: int, drafted: Tensor) -> Tensor:
        """Ids `(1, t)` of a text with some `drafted` ones `(n,)` behind it."""


@dataclass(frozen=True)
class RoundBatch:
    """The rows of a round, as it begins.

    Attributes:
        sequences: the texts.
        rows: which text each row of the caches is.
        live: places in `rows` of those that need tokens; others stand still.
        plan: what to draft; `None` where nothing can be.
    """

    sequences: Texts
    rows: Sequence[int]
    live: Sequence[int]
    plan: DraftPlan | None = None

    @cached_property
    def roots(self) -> Tensor:
        """`(B,)` the last token of each row, brought to the device where somebody asks: graphs have them there."""
        return on_device([self.sequences.last_token(row) for row in self.rows], self.sequences.device)

    @property
    def written(self) -> list[int]:
        """New tokens of each row. One that stands still counts as far as a row that does not: nothing of its noise is
        used, and nothing is made again for it."""
        lengths, live = [len(self.sequences.new[row]) for row in self.rows], set(self.live)
        first = lengths[self.live[0]] if self.live else 0
        return [length if b in live else first for b, length in enumerate(lengths)]

    @property
    def draft_depth(self) -> int:
        """Levels to draft: as planned, and no more than the longest row may get; the target adds a token of its own."""
        if self.plan is None:
            return 0
        remaining = max(self.sequences.remaining_tokens(self.rows[b]) for b in self.live)
        return min(self.plan.shape.depth, remaining - 1)


class Accepted(NamedTuple):
    """What the target accepts of a tree.

    Attributes:
        tree: the drafts.
        acceptance: of them.
        scores: of the accepted nodes where somebody may want them.
        for_host: what the host reads of it (`acceptance.for_host`), where a graph has put that together; `None` if
            `acceptance` was changed since.
    """

    tree: DraftTree
    acceptance: Acceptance
    scores: NodeScores
    for_host: Tensor | None = None


@dataclass(frozen=True)
class Written:
    """What the text got of a round, by row of the caches.

    Attributes:
        paths: accepted nodes, the root first; more of them than tokens were written where the text ended.
        tokens: written ones, none for a row that stands still.
    """

    paths: list[list[int]]
    tokens: list[list[int]]

    @property
    def counts(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]


class Round(Protocol):
    """One round's four steps over one pair of caches. Each may fail: nothing is kept of a round before `commit`."""

    @property
    def caches(self) -> PairCaches:
        """All that outlives a round."""

    def draft(self, batch: RoundBatch) -> DraftTree:
        """This round's drafts as planned, or fewer where there is no room for as many."""

    def verify(self, tree: DraftTree) -> TargetOutput:
        """Logits `(B, N, V)` and, for a drafter, hidden states `(B, N, A*Ht)` of every node, in one target forward."""

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        """What the target says to the drafts. Waits for the device only where that is free."""

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        """Keep what was written in the target's cache; by its next draft the drafter has read it, too."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the caches only."""

    def keeps_ended_rows(self, num_live: int) -> bool:
        """Whether ended rows had better stay in the batch while so many need tokens: graphs are made for its size."""


class RoundWrapper:
    """A round that does what another does, for subclasses to change a step of."""

    def __init__(self, inner: Round):
        self.inner = inner

    @property
    def caches(self) -> PairCaches:
        return self.inner.caches

    def draft(self, batch: RoundBatch) -> DraftTree:
        return self.inner.draft(batch)

    def verify(self, tree: DraftTree) -> TargetOutput:
        return self.inner.verify(tree)

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        return self.inner.accept(tree, verified, batch)

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        self.inner.commit(accepted, verified, written)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.inner.select_rows(rows)

    def keeps_ended_rows(self, num_live: int) -> bool:
        return self.inner.keeps_ended_rows(num_live)
