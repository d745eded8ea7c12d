"""What a generation of our own loop is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..drafting.costs import RoundCosts
from ..drafting.plan import DraftPolicy
from ..drafting.planner import Planner
from ..drafting.shape import DraftShape
from ..graphs.graphs import Graphs
from ..sampling.callers_code import CallersCode
from ..sampling.draw import PositionNoise
from ..sampling.logits_processing import ScoreProcessing
from ..sampling.seen_tokens import SeenTokens
from ..stats import SpeculationStats
from ..targets.prompt_forward import PromptForward
from .carried_cache import CacheExport, CacheResume
from .choosing import ChoiceRule, RoundBatch
from .text import Sequences


@dataclass
class DecodingRequest:
    """Everything one generation needs beside the models.

    Attributes:
        sequences: prompts and stopping rules.
        prompts: the same as the model's own first forward reads them; `None` where they are tokens and nothing else.
        processing: logits processors.
        shape: the largest draft of a round; caches are made for it.
        policy: decides what to draft in each round; `None`: as much as there is room for.
        do_sample: sample from the target's distribution instead of taking its arg-max.
        prefill_chunk: prompt columns per target forward; `None` for all at once.
        on_tokens: called with `(row, tokens)` as they are written (streaming).
        keep_scores, keep_logits: collect processed / raw scores of every written token.
        start: what the caches hold already.
        end: takes the caches of rows that have ended; `None` if nobody wants them.
        graphs: that compute rounds; `None`: eager code does.
        code: asks processors and criteria of the caller's; `None`: there are none.
        noise: what tokens are sampled by, from the first one on; `None`: the text is greedy.
        seen: which tokens the texts have, if that is all that processors ask beside scores; `None`: they do not.
    """

    sequences: Sequences
    processing: ScoreProcessing
    shape: DraftShape
    policy: DraftPolicy | None = None
    prompts: PromptForward | None = None
    do_sample: bool = False
    prefill_chunk: int | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    start: CacheResume = field(default_factory=CacheResume)
    end: CacheExport | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    graphs: Graphs | None = None
    code: CallersCode | None = None
    noise: PositionNoise | None = None
    seen: SeenTokens | None = None

    def __post_init__(self) -> None:
        if self.policy is None:
            costs = RoundCosts(0.0, self.shape.depth)
            self.policy = Planner(self.shape, lambda _rows: costs, schedule="constant")

    def begin(self, vocabulary: int) -> None:
        """Before the first token, for scores of so many: follow torch's generator if the text is sampled, and the
        text if processors ask which tokens it has."""
        processing = self.processing
        if self.seen is None and processing.warps_drafts and processing.draft_warping.needs_seen:
            ignored = processing.uncounted_tokens(self.sequences.batch_size)
            self.seen = SeenTokens(self.sequences.prompts, vocabulary, ignored)
        if self.do_sample and self.noise is None:
            device = self.sequences.prompts.device
            self.noise = PositionNoise(self.sequences.batch_size, vocabulary, device)
        if self.code is not None:
            self.code.noise = self.noise

    @property
    def wants_scores(self) -> bool:
        return self.keep_scores or self.keep_logits

    def choice_rules(self, batch: RoundBatch) -> list[ChoiceRule]:
        """One for all rows."""

        def ends(place: int, nodes: int, token: int) -> bool:
            return self.sequences.ends_with(batch.rows[place], token, after=nodes - 1)

        # Processors asked in order are done when the text is: a grammar has nothing to say about what comes behind.
        until = ends if self.processing.in_order else None
        places = range(len(batch.rows))
        return [ChoiceRule(places, self.processing, self.do_sample, batch.rows, self.code, until)]

    def noise_for(self, batch: RoundBatch, count: int) -> Tensor | None:
        """Noise `(B, count, V)` of each row's next tokens; `None` for a greedy text."""
        return None if self.noise is None else self.noise.window(batch.rows, batch.written, count)

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        """Which tokens each row has, `(B, V)`; `None` where nobody asks."""
        return None if self.seen is None else self.seen.of(batch.rows, self.sequences.new)
