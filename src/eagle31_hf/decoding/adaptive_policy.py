"""A `DraftPolicy` that adapts: what `adaptive.controller` decides by this machine's costs, as plans for rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..drafter.hindsight import Hindsight
from ..trees.shape import DraftShape
from .adaptive.controller import Decision, DraftController, Source
from .adaptive.prompt_lookup import NOTHING, Lookup, TextIndex
from .draft_policy import DraftPlan, DraftPolicy, ReadTexts, RoundState, RoundStats


@dataclass(frozen=True)
class PendingLookup:
    """What the text offered before a round, and how long row and text were then."""

    row: int
    written: int
    lookup: Lookup


class AdaptivePolicy(DraftPolicy):
    """Length, source and rests by a controller's decisions.

    Args:
        controller: decides.
        shape: of the drafter's drafts, as deep as the controller ever drafts.
        looks_up: whether the text itself may be drafted from. Only where a single row is written.
        on_event: told where drafts come from when that changes, and why; of rests the controller tells.
    """

    def __init__(
        self,
        controller: DraftController,
        shape: DraftShape,
        *,
        looks_up: bool = True,
        on_event: Callable[[str, str], None] | None = None,
    ):
        self.controller, self.shape, self.looks_up = controller, shape, looks_up
        self._on_event = on_event or (lambda _what, _why: None)
        self._source = Source.DRAFTER
        self._plan: tuple[Decision, DraftPlan] | None = None  # the last of the drafter's drafts; most are alike
        self._index, self._indexed_row, self._prompt_length = TextIndex(), -1, 0
        self._pending: PendingLookup | None = None
        self._sequences: ReadTexts | None = None

    def record_hindsight(self, hindsight: Hindsight) -> None:
        """Tell the controller."""
        self.controller.record_hindsight(*hindsight)

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The controller's decision as a plan."""
        lookup = self._lookup(state)
        decision = self.controller.decide(lookup)
        if decision.source is Source.NOTHING:
            return DraftPlan.skip(looks_back=decision.looks_back)
        if decision.source is Source.LOOKUP:
            return DraftPlan(DraftShape(depth=decision.depth), tokens=(lookup.tokens[: decision.depth],))
        if self._plan is None or self._plan[0] != decision:
            self._plan = decision, DraftPlan(self._shape_of(decision))
        return self._plan[1]

    def record(self, stats: RoundStats) -> None:
        """Tell the controller what became of it."""
        match = 0 if self._pending is None else self._pending.lookup.match
        self._judge_lookup()
        plan = stats.plan
        if plan.skips:
            decision = Decision(Source.NOTHING)
        elif plan.tokens is not None:
            decision = Decision(Source.LOOKUP, plan.shape.depth)
            self._tell_source(Source.LOOKUP, f"the last {match} tokens came before")
        else:
            decision = Decision(Source.DRAFTER, plan.shape.depth, plan.shape.min_confidence)
            self._tell_source(Source.DRAFTER, "the text does not repeat itself in a way that pays more")
        self.controller.record(decision, stats.depth, stats.accepted)

    def _tell_source(self, source: Source, why: str) -> None:
        if source is not self._source:
            self._source = source
            self._on_event("source", f"{source.value}: {why}")

    def _shape_of(self, decision: Decision) -> DraftShape:
        shape = self.shape.cut_to(decision.depth)
        return shape if self.shape.is_tree else replace(shape, min_confidence=decision.min_confidence)

    # --- prompt lookup -------------------------------------------------------------------------------------------

    def _lookup(self, state: RoundState) -> Lookup:
        """What the text offers; asking twice changes nothing."""
        self._pending = None
        if not self.looks_up or len(state.rows) != 1 or state.sequences is None:
            return NOTHING
        (row,), sequences = state.rows, state.sequences
        self._read_on(row, sequences)
        longest = min(self.controller.longest, state.largest.nodes - 1, state.remaining_tokens - 1)
        lookup = self._index.lookup(longest)
        if lookup.tokens:
            self._pending, self._sequences = PendingLookup(row, len(sequences.new[row]), lookup), sequences
        return lookup

    def _read_on(self, row: int, sequences: ReadTexts) -> None:
        """Bring the index up to date with the text of a row."""
        if row != self._indexed_row:
            self._index, self._indexed_row = TextIndex(sequences.text(row)), row
            self._prompt_length = len(self._index) - len(sequences.new[row])
        written = len(self._index) - self._prompt_length
        if written > len(sequences.new[row]):  # memory ran out, and tokens were taken back
            self._index.truncate(self._prompt_length + len(sequences.new[row]))
        else:
            self._index.extend(sequences.new[row][written:])

    def _judge_lookup(self) -> None:
        """Compare what the text offered with what was written, whoever drafted that."""
        pending, self._pending = self._pending, None
        if pending is None or self._sequences is None:
            return
        written: Sequence[int] = self._sequences.new[pending.row][pending.written :]
        self.controller.lookup_rates.record(pending.lookup.match, pending.lookup.tokens, written)
