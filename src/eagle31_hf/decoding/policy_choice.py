"""Which `DraftPolicy` serves a generation: `num_assistant_tokens_schedule` read with what is known of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.plan import DraftPolicy
from ..generation_config import DraftLength
from ..stats import DraftEvent, SpeculationStats
from ..trees.shape import DraftShape
from .adaptive.controller import DraftController
from .adaptive.costs import RoundCosts, RoundTable
from .adaptive.schedules import (
    CalibratedSchedule,
    ConstantSchedule,
    FewLengths,
    HeuristicSchedule,
    LengthSchedule,
    PidSchedule,
)
from .adaptive_policy import AdaptivePolicy
from .draft_backoff import DraftBackoff
from .lookup_policy import LookupPolicy
from .pair import Pair

NOMINAL_COSTS = RoundCosts(((1, 1.0), (8, 1.25), (64, 2.0)), drafter_step_s=0.06, absorb_s=0.08, round_s=0.05)
"""Of a machine nothing is known about, in plain steps: what schedules that steer go by until it is calibrated, and
what drafts of a target without a drafter are looked up by."""


@dataclass(frozen=True)
class RequestedDraft:
    """What a generation asks of its drafts.

    Attributes:
        shape: the largest draft of a round.
        start: draft depth asked for, or the default one.
        rows: batch size.
        context: tokens of the longest prompt.
        sampled: tokens are drawn.
        compiled: rounds are computed by graphs.
    """

    shape: DraftShape
    start: int
    rows: int
    context: int
    sampled: bool
    compiled: bool

    @classmethod
    def of(
        cls, drafter: Assistant, length: DraftLength, *, rows: int, context: int, sampled: bool, compiled: bool
    ) -> RequestedDraft:
        """By a drafter's settings, for drafts of `length`; the rest as above."""
        settings = drafter.generation_config
        shortest, longest = settings.steered_bounds(length.depth, compiled=compiled)
        return cls(
            shape=settings.draft_shape(replace(length, depth=longest)),
            start=min(max(length.depth, shortest), longest),
            rows=rows,
            context=context,
            sampled=sampled,
            compiled=compiled,
        )


def choose_policy(drafter: Assistant, requested: RequestedDraft, stats: SpeculationStats) -> DraftPolicy:
    """The policy of one generation; changes it makes are told in `stats.events`.

    Which one, and all it decides, depends on settings, counts, what earlier texts accepted, and the calibration.
    """
    schedule, history = drafter.generation_config.num_assistant_tokens_schedule, Pair.of(drafter).history
    has_network = isinstance(drafter, Eagle31Drafter)
    if has_network and schedule == "constant":
        return DraftBackoff()
    calibration = history.calibration(drafter, compiled=requested.compiled)
    if has_network and calibration is None and schedule == "calibrated":
        return DraftBackoff()
    costs = NOMINAL_COSTS if calibration is None else calibration.costs(requested.context)
    if not has_network:
        return LookupPolicy(costs, requested.shape.depth)
    table = costs.rounds(
        requested.shape.depth, rows=requested.rows, nodes=requested.shape.nodes if requested.shape.is_tree else None
    )
    tell = _teller(stats)
    controller = DraftController(
        table,
        _schedule(drafter, schedule, table, requested),
        prior=history.prior,
        asks_confidence=schedule == "calibrated" and requested.shape.min_confidence > 0,
        on_event=tell,
    )
    return AdaptivePolicy(controller, requested.shape, looks_up=requested.rows == 1, on_event=tell)


def _schedule(drafter: Assistant, name: str, table: RoundTable, requested: RequestedDraft) -> LengthSchedule:
    longest = requested.shape.depth
    shortest, _ = drafter.generation_config.steered_bounds(requested.start, compiled=requested.compiled)
    if requested.shape.is_tree:  # drafted whole, or not
        return ConstantSchedule(longest)
    lengths: Sequence[int] = range(shortest, longest + 1)
    if requested.compiled:  # another length is another graph, which takes a CPU minutes to make
        on_cpu = drafter.device.type == "cpu"
        lengths = (longest,) if name == "calibrated" and on_cpu else _few(lengths)
    if name == "calibrated":
        return CalibratedSchedule(table, lengths)
    steered: LengthSchedule = HeuristicSchedule(requested.start, longest, shortest)
    if name == "pid":
        steered = PidSchedule(table, requested.start, longest, shortest)
    return FewLengths(steered, lengths) if requested.compiled else steered


def _few(lengths: Sequence[int]) -> list[int]:
    """The shortest of these, the longest, and one between."""
    return sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})


def _teller(stats: SpeculationStats) -> Callable[[str, str], None]:
    def tell(what: str, why: str) -> None:
        stats.events.append(DraftEvent(stats.accepted + stats.rounds, what, why))

    return tell
