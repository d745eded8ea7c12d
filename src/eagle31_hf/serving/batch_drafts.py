"""How much a running batch drafts: one planner for all rows, which share their rounds."""

from __future__ import annotations

import logging
from functools import partial

from ..decoding.drafting import default_length, planner_of
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.plan import DraftPlan, ReadTexts, RoundState, RoundStats
from ..trees.shape import DraftShape

logger = logging.getLogger(__name__)


def batch_shape(drafter: Assistant, *, compiled: bool) -> DraftShape:
    """The longest chain of any round; of a single row, where no graph drafts, doubt may end it.

    Args:
        compiled: rounds are computed by graphs.
    """
    make = partial(default_length, drafter, sampled=False, compiled=compiled)
    lengths = [make(batch_size=rows) for rows in (1, 2)]  # one row, and more of them
    return DraftShape(max(each.depth for each in lengths), min_confidence=lengths[0].min_confidence)


class BatchDrafts:
    """What texts have shown outlives them.

    Args:
        drafter: attached, or `NoDrafter`.
        texts: of the batch.
        shape: of the largest draft.
        compiled: rounds are computed by graphs.
    """

    def __init__(self, drafter: Assistant, texts: ReadTexts, shape: DraftShape, *, compiled: bool):
        self.shape = shape
        self._texts = None if isinstance(drafter, Eagle31Drafter) else texts
        self.planner = planner_of(drafter, shape, compiled=compiled, on_event=_tell)

    def next_draft(self, rows: int, *, remaining: int) -> DraftPlan:
        """What to draft for so many rows.

        Args:
            remaining: most tokens that one of them may still get; the round itself cuts the draft to that.
        """
        if remaining < 2 or not self.shape.depth:
            return DraftPlan(DraftShape(0))
        return self.planner.next_draft(RoundState(self.shape, range(rows), self._texts, remaining))

    def text_joins(self) -> None:
        """Another text may be of another kind: a drafter that rests is soon tried again."""
        self.planner.shorten_rest()

    def record(self, plan: DraftPlan, drafted: int, accepted: list[int], seconds: float) -> None:
        """Learn what became of a plan: `drafted` tokens one after another, so many `accepted` by each row."""
        if plan.skips or drafted:
            rows = tuple(range(len(accepted)))
            self.planner.record(RoundStats(plan, drafted, drafted, rows, tuple(accepted), seconds))


def _tell(what: str, why: str) -> None:
    logger.info("eagle31: the batch's drafts: %s, %s", what, why)
