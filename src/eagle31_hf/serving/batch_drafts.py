"""How much a running batch drafts: by what its texts accept, and by what rounds of so many rows take here."""

from __future__ import annotations

import logging

from ..decoding.adaptive.controller import DraftController
from ..decoding.adaptive.schedules import CalibratedSchedule
from ..decoding.adaptive_policy import AdaptivePolicy
from ..decoding.calibration.calibration import Calibration
from ..decoding.default_length import default_length
from ..decoding.draft_backoff import DraftBackoff
from ..decoding.lookup_policy import LookupPolicy
from ..decoding.pair import Pair
from ..decoding.policy_choice import NOMINAL_COSTS
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.hindsight import Hindsight
from ..drafting.plan import DraftPlan, DraftPolicy, ReadTexts, RoundState, RoundStats
from ..generation_config import DraftLength
from ..trees.shape import DraftShape

logger = logging.getLogger(__name__)


def longest_draft(drafter: Assistant) -> int:
    """Tokens of the longest chain of any round."""
    return max(_length(drafter, rows).depth for rows in (1, 2))  # one row, and more of them


def _length(drafter: Assistant, rows: int) -> DraftLength:
    if isinstance(drafter, Eagle31Drafter):
        return drafter.generation_config.draft_length(device_type=drafter.device.type, batch_size=rows)
    return default_length(drafter, batch_size=rows, sampled=False)


def batch_drafts(drafter: Assistant, texts: ReadTexts) -> BatchDrafts | BatchLookups:
    """What a batch of these texts drafts."""
    return BatchDrafts(drafter) if isinstance(drafter, Eagle31Drafter) else BatchLookups(drafter, texts)


class BatchLookups:
    """The same without a drafter: each text offers what followed when its last tokens were written before.

    What a text has shown is kept with it, so the same text alone is written in rounds of the same widths again.

    Args:
        drafter: attached.
        texts: of the batch.
    """

    def __init__(self, drafter: Assistant, texts: ReadTexts):
        self.longest, self._texts = longest_draft(drafter), texts
        self._policy = LookupPolicy(NOMINAL_COSTS, self.longest)

    def next_draft(self, rows: int, *, context: int, remaining: int) -> DraftPlan:
        """As `BatchDrafts.next_draft`."""
        largest = DraftShape(self.longest if remaining > 1 else 0)
        return self._policy.next_draft(RoundState(largest, range(rows), self._texts, remaining))

    def text_joins(self) -> None:
        """Nothing changes for the others."""

    def record_hindsight(self, hindsight: Hindsight) -> None:
        """Nobody looks back."""

    def record(self, plan: DraftPlan, drafted: int, accepted: list[int]) -> None:
        """As `BatchDrafts.record`."""
        self._policy.record(RoundStats(plan, drafted, drafted, tuple(range(len(accepted))), tuple(accepted)))


class BatchDrafts:
    """One decision for all rows, which share their rounds; what texts have shown outlives them.

    Without a calibration, and with the schedule `"constant"`, chains are as long as the drafter's settings say, and
    drafting pauses where it is in vain.

    Args:
        drafter: attached.

    Attributes:
        longest: chain of any round.
    """

    def __init__(self, drafter: Eagle31Drafter):
        self.drafter, self.longest = drafter, longest_draft(drafter)
        is_steered = drafter.generation_config.num_assistant_tokens_schedule != "constant"
        self._calibration = Pair.of(drafter).history.calibration(drafter, compiled=False) if is_steered else None
        self._rows = 0
        self._controller: DraftController | None = None
        self._policy: DraftPolicy = DraftBackoff()

    def length(self, rows: int) -> DraftLength:
        """Of the longest chain for so many rows, and the doubt that ends it earlier."""
        return _length(self.drafter, rows)

    def next_draft(self, rows: int, *, context: int, remaining: int) -> DraftPlan:
        """What to draft for so many rows.

        Args:
            context: tokens of a row, about.
            remaining: most tokens that one of them may still get; the round itself cuts the draft to that.
        """
        length = self.length(rows)
        if self._calibration is not None and rows != self._rows:
            self._share_rounds(self._calibration, rows, context)
        if remaining < 2:
            return DraftPlan(DraftShape(depth=0))
        largest = DraftShape(length.depth, min_confidence=length.min_confidence)
        plan = self._policy.next_draft(RoundState(largest, range(rows), None, remaining))
        depth = min(plan.shape.depth, largest.depth)
        return plan if plan.skips else DraftPlan(DraftShape(depth, min_confidence=length.min_confidence))

    def text_joins(self) -> None:
        """Another text may be of another kind: what the others have shown is soon looked at again."""
        if self._controller is None:
            self._policy = DraftBackoff()
        else:
            self._controller.guard.shorten_rest()

    def record_hindsight(self, hindsight: Hindsight) -> None:
        """Learn how often a drafter that rested would have been right, where the plan looks back."""
        self._policy.record_hindsight(hindsight)

    def record(self, plan: DraftPlan, drafted: int, accepted: list[int]) -> None:
        """Learn what became of a plan: `drafted` tokens one after another, so many `accepted` by each row."""
        if plan.skips or drafted:
            rows = tuple(range(len(accepted)))
            self._policy.record(RoundStats(plan, drafted, drafted, rows, tuple(accepted)))

    def _share_rounds(self, calibration: Calibration, rows: int, context: int) -> None:
        """From now on so many rows share each round."""
        self._rows, longest = rows, self.length(rows).depth
        table = calibration.costs(context).rounds(self.longest, rows=rows)
        schedule = CalibratedSchedule(table, range(1, longest + 1))
        if self._controller is None:
            self._controller = DraftController(table, schedule, on_event=_tell)
            self._policy = AdaptivePolicy(self._controller, DraftShape(self.longest), looks_up=False)
        else:
            self._controller.use(table, schedule)


def _tell(what: str, why: str) -> None:
    logger.info("eagle31: the batch's drafts: %s, %s", what, why)
