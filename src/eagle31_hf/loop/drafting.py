"""What a pair drafts: how long, in which shape, by whose decisions and by which graphs.

Asked by `generate`, by the server and by the commands that measure; nothing else decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.step_share import longest_worthwhile, step_share
from ..drafting.costs import WIDTH, WIDTH_IN_HALF, WIDTH_ON_CPU, RoundCosts
from ..drafting.planner import Planner
from ..drafting.rates import FIRST_RATE
from ..drafting.shape import DraftShape
from ..graphs.captured import CAPTURES
from ..graphs.graph_makers import GraphMaker
from ..sampling.logits_processing import ScoreProcessing
from ..settings import COMPILED, COMPILED_SAMPLED, LONGEST_CHAIN, LONGEST_STEERED, DraftLength
from ..stats import DraftEvent, SpeculationStats
from .kept_graphs import RequestedDraft, captured_graphs, graph_maker, why_given_up
from .pair import Pair

FEWEST_LEVELS = 3
"""Of a tree of eight nodes that is worth more than a chain of as many steps."""


@dataclass(frozen=True)
class Drafting:
    """All that a text, or a server's batch, needs to know of its drafts.

    Attributes:
        shape: the largest draft of a round; caches are made for it.
        planner: decides before each round, and is told what became of it.
        graphs: where graphs of rounds come from; `None`: rounds are eager.
        why: why there are no graphs though they could be had; empty if nothing keeps them away.
    """

    shape: DraftShape
    planner: Planner
    graphs: GraphMaker | None
    why: str = ""


def drafting(
    drafter: Assistant,
    *,
    rows: int,
    sampled: bool,
    processing: ScoreProcessing,
    new_tokens: int,
    depth: int | None = None,
    stats: SpeculationStats | None = None,
) -> Drafting:
    """What a text, or a batch of them, drafts.

    Args:
        drafter: attached, or `NoDrafter`.
        rows: texts that share their rounds.
        sampled: whether tokens are drawn.
        processing: the call's logits processors.
        new_tokens: that a row may get.
        depth: draft tokens that the call itself asks for; default: by the drafter's settings.
        stats: told in `events` what the planner changes and why.
    """
    requested = by_graphs(drafter, rows=rows, sampled=sampled, depth=depth)
    maker = graph_maker(drafter, requested, processing, new_tokens=new_tokens)
    if stats is not None and drafter.binding.has_states and (drafter.generation_config.asked_top_k or 1) > 1:
        stats.fall_back("trees are drafted as chains of their depth where layers of the target keep states")
    compiled = maker is not None
    shape = requested.shape if compiled else _shape(drafter, rows=rows, sampled=sampled, depth=depth, compiled=False)
    planner = planner_of(
        drafter, shape, compiled=compiled, start=depth, on_event=None if stats is None else _teller(stats)
    )
    return Drafting(shape, planner, maker, "" if compiled else why_given_up(drafter))


def by_graphs(drafter: Assistant, *, rows: int, sampled: bool, depth: int | None = None) -> RequestedDraft:
    """What is drafted where rounds are computed by graphs; arguments as of `drafting`."""
    return RequestedDraft(_shape(drafter, rows=rows, sampled=sampled, depth=depth, compiled=True), rows, sampled)


def batch_shape(drafter: Assistant) -> DraftShape:
    """The longest chain of any round of a batch whose rows come and go; of a single row, where no graph drafts, doubt
    may end it."""
    compiled = captured_graphs(drafter) is not None
    lengths = [default_length(drafter, batch_size=rows, sampled=False, compiled=compiled) for rows in (1, 2)]
    return DraftShape(max(length.depth for length in lengths), min_confidence=lengths[0].min_confidence)


def planner_of(
    drafter: Assistant,
    shape: DraftShape,
    *,
    compiled: bool,
    start: int | None = None,
    on_event: Callable[[str, str], None] | None = None,
) -> Planner:
    """A planner of drafts up to `shape`.

    Args:
        compiled: rounds are computed by graphs.
        start: draft tokens that were asked for, where the schedule `"pid"` begins.
        on_event: as `Planner` takes it.
    """
    settings, has_drafter = drafter.generation_config, isinstance(drafter, Eagle31Drafter)
    lengths = range(1, shape.depth + 1)
    if compiled:  # another length is another graph, which takes a CPU minutes to make
        on_cpu = drafter.binding.head_device.type not in CAPTURES
        lengths = [shape.depth] if on_cpu else sorted({1, (shape.depth + 1) // 2, shape.depth})  # type: ignore[assignment]
    pair = Pair.of(drafter)

    def costs(rows: int) -> RoundCosts:
        key = compiled, shape, rows.bit_length()
        if key not in pair.costs:
            pair.costs[key] = _costs(drafter, shape, compiled=compiled)
        return pair.costs[key]

    return Planner(
        shape,
        costs,
        schedule=settings.num_assistant_tokens_schedule,
        lengths=lengths,
        start=start or settings.num_assistant_tokens,
        has_drafter=has_drafter,
        on_event=on_event,
    )


def _costs(drafter: Assistant, shape: DraftShape, *, compiled: bool) -> RoundCosts:
    """By bytes, of rounds that were not timed yet."""
    share = step_share(drafter) if isinstance(drafter, Eagle31Drafter) else 0.0
    width = WIDTH
    if not compiled and drafter.binding.head_device.type == "cpu":
        width = WIDTH_ON_CPU if drafter.binding.model.dtype == torch.float32 else WIDTH_IN_HALF
    return RoundCosts(share, max(shape.depth, shape.nodes - 1), width)


def _shape(drafter: Assistant, *, rows: int, sampled: bool, depth: int | None, compiled: bool) -> DraftShape:
    """The largest draft of a round."""
    length = default_length(drafter, batch_size=rows, sampled=sampled, asked=depth, compiled=compiled)
    settings = drafter.generation_config
    if settings.num_assistant_tokens_schedule == "pid" and length.top_k == 1 and not compiled:
        length = DraftLength(max(length.depth, LONGEST_STEERED))
    shape = settings.draft_shape(length)
    return shape.as_chain() if drafter.binding.has_states else shape


def default_length(
    drafter: Assistant, *, batch_size: int, sampled: bool, asked: int | None = None, compiled: bool
) -> DraftLength:
    """As `Eagle31GenerationConfig.draft_length`; captured chains go by what the pair's weights take to be read, and
    without a drafter chains are looked up."""
    settings = drafter.generation_config
    if not isinstance(drafter, Eagle31Drafter):
        if settings.num_assistant_tokens_schedule == "constant":
            return DraftLength(0)
        return DraftLength(asked or settings.num_assistant_tokens or (COMPILED.depth if compiled else LONGEST_CHAIN))
    is_asked = asked is not None or settings.num_assistant_tokens is not None
    return settings.draft_length(
        device_type=drafter.device.type,
        batch_size=batch_size,
        sampled=sampled,
        asked=asked,
        compiled=compiled,
        by_graphs=None if is_asked or not compiled else _drafted_by_graphs(drafter, sampled=sampled),
    )


def _drafted_by_graphs(drafter: Eagle31Drafter, *, sampled: bool) -> DraftLength:
    """What pays where nothing is asked for; on a card by the weights that a step reads."""
    binding, usual, is_packed = drafter.binding, COMPILED_SAMPLED if sampled else COMPILED, False
    if drafter.device.type in CAPTURES:
        depth = longest_worthwhile(step_share(drafter), FIRST_RATE, longest=_longest_with_room(drafter))
        usual = DraftLength(depth) if depth < FEWEST_LEVELS else replace(usual, depth=depth)
        is_packed = getattr(binding.model, "hf_quantizer", None) is not None
    return DraftLength(usual.depth) if is_packed else usual  # they make a product dearer with its rows


def _longest_with_room(drafter: Eagle31Drafter) -> int:
    """Tokens of a draft where no length is asked for."""
    plan = drafter.memory_plan
    return LONGEST_STEERED if plan is None else min(LONGEST_STEERED, plan.settings.draft_tokens)


def _teller(stats: SpeculationStats) -> Callable[[str, str], None]:
    def tell(what: str, why: str) -> None:
        stats.events.append(DraftEvent(stats.accepted + stats.rounds, what, why))

    return tell
