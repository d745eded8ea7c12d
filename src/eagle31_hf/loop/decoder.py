"""Our decoding loop: rounds over a batch of texts, any batch, any prompt.

The decoder keeps rows and text; what a round computes is the `Round`'s business. One step (`SpeculativeDecoder.step`)
is the figure in docs/developing/architecture.md. Each row accepts its own number of tokens; the host waits for the
device once a round, to read what was accepted. Rows that have ended leave the batch, unless graphs were made for its
size: then they stand still in it until few are left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from ..drafter.assistant import Assistant
from ..drafting.draft_tree import DraftTree
from ..drafting.plan import DraftPlan, DraftPolicy
from ..drafting.shape import DraftShape
from ..graphs.graphs import Graphs
from ..sampling.callers_code import CallersCode
from ..sampling.draw import NOT_PLAIN, PositionNoise
from ..sampling.logits_processing import ScoreProcessing
from ..sampling.seen_tokens import SeenTokens
from ..stats import NOT_A_NUMBER, RoundClock, SpeculationStats
from ..targets.binding import TargetBinding
from ..targets.prompt_forward import PromptForward
from .accept import Accepted, Acceptor
from .carried_cache import CarriedCache
from .choosing import ChoiceRule, RoundBatch
from .pair_caches import PairCaches
from .prefill import ChunkedPrefill, PrefillState
from .round import Round
from .text import Sequences

logger = logging.getLogger(__name__)


@dataclass
class DecodingRequest:
    """Everything one generation needs beside the models.

    Attributes:
        sequences: prompts and stopping rules.
        prompts: the same as the model's own first forward reads them; `None` where they are tokens and nothing else.
        processing: logits processors.
        shape: the largest draft of a round; caches are made for it.
        policy: decides what to draft in each round.
        do_sample: sample from the target's distribution instead of taking its arg-max.
        prefill_chunk: prompt columns per target forward; `None` for all at once.
        on_tokens: called with `(row, tokens)` as they are written (streaming).
        keep_scores, keep_logits: collect processed / raw scores of every written token.
        carried: the cache that this turn goes on with, and the next one; `None`: there is none.
        graphs: that compute rounds; `None`: eager code does.
        code: asks processors and criteria of the caller's, of a single text; `None`: there are none.
        noise: what tokens are sampled by, from the first one on; `None`: the text is greedy.
        seen: which tokens the texts have, if that is all that processors ask beside scores; `None`: they do not.
    """

    sequences: Sequences
    processing: ScoreProcessing
    shape: DraftShape
    policy: DraftPolicy
    prompts: PromptForward | None = None
    do_sample: bool = False
    prefill_chunk: int | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    carried: CarriedCache | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    graphs: Graphs | None = None
    code: CallersCode | None = None
    noise: PositionNoise | None = None
    seen: SeenTokens | None = None

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
    def skip(self) -> int:
        """First columns of the prompts that are not read: a carried cache holds them."""
        return 0 if self.carried is None else self.carried.skip

    @property
    def wants_scores(self) -> bool:
        return self.keep_scores or self.keep_logits

    def choice_rules(self, batch: RoundBatch) -> list[ChoiceRule]:
        """One for all rows."""
        # Processors asked in order are done when the text is: a grammar has nothing to say about what comes behind.
        ends = partial(self._ends, batch) if self.code is not None else None
        return [ChoiceRule(range(len(batch.rows)), self.processing, self.do_sample, batch.rows, self.code, ends)]

    def _ends(self, batch: RoundBatch, place: int, nodes: int, token: int) -> bool:
        assert self.code is not None, "see choice_rules"
        row, after = batch.rows[place], nodes - 1
        is_followed = self.code.is_followed(self.sequences.length(row) + after, asked=True)
        return not is_followed or self.sequences.ends_with(row, token, after=after)

    def noise_for(self, batch: RoundBatch, count: int) -> Tensor | None:
        """Noise `(B, count, V)` of each row's next tokens; `None` for a greedy text."""
        return None if self.noise is None else self.noise.window(batch.rows, batch.written, count)

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        """Which tokens each row has, `(B, V)`; `None` where no processor asks."""
        return None if self.seen is None else self.seen.of(batch.rows, self.sequences.new)


class Stage(Enum):
    """Where a step is."""

    PREFILL = "reading the text (prefill)"
    DRAFT = "draft"
    VERIFY = "verify"
    COMMIT = "keeping what was accepted"


class SpeculativeDecoder:
    """One generation with our own loop: `prefill`, then `step` while there are `rows`, then `finish`.

    Args:
        drafter: attached, or `NoDrafter`; its binding's target verifies.
        request: what to write.

    Attributes:
        rows: which row of the texts each row of the caches is; empty once all have ended.
        round: drafts, verifies, accepts and commits.
        graphs: that compute it; `None`: eager code does. See `drop_graphs`.
        largest: the largest draft that policies are offered.
        chunk: prompt columns per target forward.
        stage: where a step is; after a failure, where it happened.
        reading: the text that was last read into the caches (prefill).
    """

    def __init__(self, drafter: Assistant, request: DecodingRequest):
        self.drafter, self.request = drafter, request
        self.binding: TargetBinding = drafter.binding
        self.sequences = request.sequences
        self.clock = RoundClock(request.stats)
        self.rows = list(range(self.sequences.batch_size))
        self.stage, self.largest = Stage.PREFILL, request.shape
        prompt = self.sequences.prompts.shape[1] - request.skip  # columns still to be read
        least = len(self.rows) + 2 if self.binding.has_states else 1  # so that no token need be read alone
        self.chunk = min(max(request.prefill_chunk or prompt, least), prompt)
        self.reading: PrefillState | None = None
        self.graphs = request.graphs
        self._streamed = [0] * len(self.rows)  # new tokens of each row of the batch that were shown
        self.round = self._rounds_over(self._new_caches(len(self.rows)))

    @property
    def caches(self) -> PairCaches:
        return self.round.caches

    def drop_graphs(self) -> None:
        """Go on by eager code, over the same caches."""
        self.graphs = None
        self.round = self._rounds_over(self.caches)

    def stop_drafting(self) -> None:
        """Go on without the drafter, and without graphs."""
        self.caches.drafter, self.largest = None, self.largest.cut_to(0)
        self.drop_graphs()

    def renew_caches(self) -> None:
        """Go on over empty caches for the present rows; the old ones go before the new ones come."""
        drafts = self.caches.drafter is not None
        self.caches.give_back()
        del self.round
        caches = self._new_caches(len(self.rows))
        if not drafts:
            caches.drafter = None
        self.round = self._rounds_over(caches)

    def _rounds_over(self, caches: PairCaches) -> Round:
        return Round(self.drafter, caches, self.request, self.clock, self.graphs)

    def _new_caches(self, batch_size: int) -> PairCaches:
        cache_type = self.request.stats.cache_type = self.drafter.generation_config.stored_cache_type
        captures = self.graphs is not None and self.graphs.maker.exact_sizes
        caches = PairCaches.make(
            self.drafter,
            self.largest,
            batch_size=batch_size,
            length=self.sequences.rules.max_length,
            chunk=self.chunk,
            for_graphs=self.graphs is not None,
            exact_sizes=captures,
            cache_type=cache_type,
            device=self.sequences.prompts.device,
        )
        if self.graphs is not None and captures:
            caches.write_in(self.graphs.kept)
        return caches

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """Around all that is done with the caches: the next text may write in their memory, however this one ends.

        An interrupted one can live on in a traceback that a notebook keeps.
        """
        try:
            yield
        finally:
            self.caches.give_back()

    def finish(self) -> Tensor:
        """Close the figures and return the text, `(B, L + n)` ids."""
        self._settle_noise()
        self.request.stats.new_tokens = sum(len(new) for new in self.sequences.new)
        return self.sequences.assemble()

    def _settle_noise(self) -> None:
        """Leave torch's generator where plain `generate` would have left it."""
        noise, code = self.request.noise, self.request.code
        if self._leaves_noise:
            assert code is not None, "it has met something"
            code.leave_generators()
            self.request.stats.fall_back(NOT_PLAIN if code.asked_ahead else "")
        elif noise is not None and not noise.settle(self.sequences.output_length):
            self.request.stats.fall_back(NOT_PLAIN)

    @property
    def _leaves_noise(self) -> bool:
        """Whether the caller's code has done what noise that was taken ahead cannot follow."""
        code = self.request.code
        return code is not None and not code.is_followed(self.sequences.length(0), asked=False)

    def _follow_callers_code(self) -> None:
        """From where that was met, torch draws each token itself: nothing is drafted."""
        if self._leaves_noise and (self.largest.depth or self.request.noise is not None):
            assert self.request.code is not None, "it has met something"
            self.request.stats.fall_back(f"nothing is drafted any more: {self.request.code.why}")
            self.request.noise = None
            self.stop_drafting()

    # --- prefill -------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Target and drafter read the prompts; then the target's first token. If that is there already, they read all
        that was written."""
        self.stage = Stage.PREFILL
        carried = self.request.carried
        if carried is not None:
            carried.load(self.caches.target, self.caches.drafter)
        texts = [self.sequences.text(row, self.request.skip) for row in self.rows]
        if not any(self.sequences.new[row] for row in self.rows):
            return self.first_token(self.read(texts, unread=0))
        self.read(texts, unread=1)
        self.stage = Stage.COMMIT
        self.let_ended_rows_go(self.unfinished_rows())

    def read(self, texts: Sequence[Sequence[int]], *, unread: int) -> PrefillState:
        """Target and drafter read what lies behind their caches, in chunks; see `PrefillState`."""
        prefill = ChunkedPrefill(self.binding, self.caches.target, self.caches.drafter)
        prompts, device = self.request.prompts, self.sequences.prompts.device
        if prompts is not None and not any(self.caches.target.lengths):
            self.reading = PrefillState(texts, unread=0, device=device)
            prefill.read_prompts(prompts, self.rows, self.reading, self.chunk)
            if not unread:
                return self.reading
            texts = [text[n:] for text, n in zip(texts, prompts.lengths(self.rows), strict=True)]
        written = [min(len(text), len(self.sequences.new[row])) for text, row in zip(texts, self.rows, strict=True)]
        if self.caches.target.has_states and any(written):
            texts = self._read_prompts_apart(prefill, texts, written)
            prefill = ChunkedPrefill(self.binding, self.caches.target, self.caches.drafter, as_drafts=True)
        self.reading = PrefillState(texts, unread=unread, device=device)
        prefill.read(self.reading, self.chunk)
        return self.reading

    def _read_prompts_apart(
        self, prefill: ChunkedPrefill, texts: Sequence[Sequence[int]], written: Sequence[int]
    ) -> list[Sequence[int]]:
        """Read what of the texts belongs to prompts and return the rest, of which `written` tokens were decoded one by
        one: layers with states may compute otherwise over many tokens."""
        self.reading = PrefillState(texts, unread=0, device=self.sequences.prompts.device)
        self.reading.to_read = [len(text) - n for text, n in zip(texts, written, strict=True)]
        prefill.read(self.reading, self.chunk)
        return [text[n:] for text, n in zip(texts, self.reading.to_read, strict=True)]

    def first_token(self, prompts: PrefillState) -> None:
        """Write the token after each prompt, which no draft was made for."""
        batch = RoundBatch(self.request, list(self.rows), self.unfinished_rows())
        logits = torch.stack(prompts.last_logits)[:, None]  # type: ignore[arg-type]
        self.request.begin(logits.shape[-1])
        accepted = Acceptor(DraftTree.chain(self.sequences.prompts[batch.rows, -1:]), logits, batch).accept()
        self._collect_scores(accepted, logits, batch)
        written = self._write(accepted.tokens, batch)
        self.stage = Stage.COMMIT
        staying = self.unfinished_rows()
        if staying or self.request.carried is not None:
            self.round.absorb(written, prompts.last_aux)
            if self.graphs is not None:
                self.caches.catch_up()  # at once and by eager code: else a graph would be made for this alone
        self._follow_callers_code()
        self.let_ended_rows_go(staying)

    # --- one round -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One round: draft, verify, accept; from then on the text is longer, and the caches follow."""
        self.clock.begin_round()
        self.stage, live = Stage.DRAFT, self.unfinished_rows()
        batch = RoundBatch(self.request, list(self.rows), live, self._plan(live))
        tree = self.round.draft(batch)
        self.stage = Stage.VERIFY
        verified = self.round.verify(tree)
        accepted = self.round.accept(tree, verified, batch)
        if accepted.is_broken:
            self.request.stats.note_draft("stop", NOT_A_NUMBER)
            logger.warning("eagle31: %s", NOT_A_NUMBER)
            self.stop_drafting()
        self._collect_scores(accepted, verified.logits, batch)
        written = self._write(accepted.tokens, batch)
        self.stage = Stage.COMMIT
        self.round.record(self.request.policy, tree, batch, accepted, written)
        staying = self.unfinished_rows()
        if staying or self.request.carried is not None:
            self.round.commit(accepted, verified, written)
        self._follow_callers_code()
        self.let_ended_rows_go(staying)
        self.clock.end_round()

    def _plan(self, live: Sequence[int]) -> DraftPlan | None:
        """What the policy wants of this round; it is not asked where nothing can be drafted."""
        live_rows = [self.rows[b] for b in live]
        remaining = max(self.sequences.remaining_tokens(row) for row in live_rows)
        if remaining < 2 or self.largest.depth < 1:
            return None
        return self.request.policy.next_draft(live_rows, self.sequences, remaining)

    def _write(self, emitted: list[list[int]], batch: RoundBatch) -> list[list[int]]:
        """Add each live row's new tokens to the text. Returns those of them that come before the row's end."""
        written: list[list[int]] = [[] for _ in self.rows]
        self._require_tokens([emitted[b] for b in batch.live])
        for b in batch.live:
            written[b] = emitted[b][: self.sequences.append(self.rows[b], emitted[b])]
        self.clock.note_tokens(sum(len(new) for new in self.sequences.new))
        self.sequences.stop_if_out_of_time()
        return written

    def _require_tokens(self, emitted: Sequence[Sequence[int]]) -> None:
        """Raise as `generate` does where there was nothing to sample from (`draw.choose`)."""
        noise = self.request.noise
        if noise is not None and any(noise.vocabulary in tokens for tokens in emitted):
            raise ValueError(
                "the target's scores are no numbers, or its processors have forbidden every token: there is nothing to "
                "sample from; look at the model's dtype and at the logits processors"
            )

    def stream(self) -> None:
        """Show what was written since the last time. Apart from the round: what a streamer raises is not ours."""
        if self.request.on_tokens is None:
            return
        for row, new in enumerate(self.sequences.new):
            if len(new) > self._streamed[row]:
                start, self._streamed[row] = self._streamed[row], len(new)
                self.request.on_tokens(row, new[start:])

    # --- after a round -------------------------------------------------------------------------------------------

    def let_ended_rows_go(self, staying: Sequence[int]) -> None:
        """After a round: rows but those at the places of unfinished ones leave the batch, unless graphs were made for
        its size."""
        if not staying:
            self.rows = []
        elif len(staying) < len(self.rows) and not self.round.keeps_ended_rows(len(staying)):
            self.rows = [self.rows[b] for b in staying]  # first: caches that do not follow are known by it
            self.caches.select_rows(staying)

    def unfinished_rows(self) -> list[int]:
        """Places of the rows that need more tokens."""
        live = set(self.sequences.live_rows())
        return [b for b, row in enumerate(self.rows) if row in live]

    # --- scores that the call wants ------------------------------------------------------------------------------

    def _collect_scores(self, accepted: Accepted, logits: Tensor, batch: RoundBatch) -> None:
        """Keep scores of the tokens that live rows are about to get, if asked to."""
        request, scores = self.request, accepted.scores
        for b in batch.live if request.wants_scores else ():
            for node in accepted.paths[b]:
                if request.keep_scores:
                    self.sequences.scores[self.rows[b]].append(scores[b, node])
                if request.keep_logits:
                    self.sequences.logits[self.rows[b]].append(logits[b, node].float())
