"""A `DraftPolicy` that adapts: what `adaptive.controller` decides by this machine's costs, as plans for rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..drafter.hindsight import Hindsight
from ..drafting.lookup import NOTHING, Lookup, RepeatingText
from ..drafting.plan import DraftPlan, DraftPolicy, ReadTexts, RoundState, RoundStats
from ..trees.shape import DraftShape
from .adaptive.controller import Decision, DraftController, Source


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
        self._text: RepeatingText | None = None  # of this row of these
        self._row = -1
        self._sequences: ReadTexts | None = None

    def record_hindsight(self, hindsight: Hindsight) -> None:
        """Tell the controller."""
        self.controller.record_hindsight(*hindsight)

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The controller's decision as a plan."""
        lookup = self._look_up(state)
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
        match = 0
        if self._text is not None and self._sequences is not None:
            match = self._text.offered.match
            self._text.judge(self._sequences.new[self._row])
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

    def _look_up(self, state: RoundState) -> Lookup:
        """What the text offers; asking twice changes nothing."""
        if not self.looks_up or len(state.rows) != 1 or state.sequences is None:
            return NOTHING
        (row,), self._sequences = state.rows, state.sequences
        new = state.sequences.new[row]
        if self._text is None or row != self._row:
            self._row = row
            self._text = RepeatingText(state.sequences.text(row), len(new), self.controller.lookup_rates)
        longest = min(self.controller.longest, state.largest.nodes - 1, state.remaining_tokens - 1)
        return self._text.look_up(new, longest)
