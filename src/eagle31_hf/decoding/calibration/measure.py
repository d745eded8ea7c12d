"""Measure a calibration: single forwards at several widths and two contexts, then the loop around them. Seconds.

By graphs whole rounds are measured: a graph drafts all of a chain, and more graphs are not to be made for measuring.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...compiled.captured import CAPTURES, CapturesSteps
from ...compiled.graph_makers import CompilesAtOnce, GraphMaker
from ...compiled.shapes import node_bucket
from ...drafter.drafter import Eagle31Drafter
from ...sampling.logits_processing import ScoreProcessing
from ...target.binding import TargetBinding
from ...target.device_clock import now
from ...trees.shape import DraftShape
from ..decoder import SpeculativeDecoder
from ..draft_policy import DraftPlan, DraftPolicy, RoundState, RoundStats
from ..request import DecodingRequest
from ..text import Sequences, StopRules
from .bare_meter import BareMeter, WidthSeconds
from .calibration import Calibration, ContextSeconds

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 768)
"""Tokens before a round. Graphs are measured behind the first: every length of rows is a graph of its own."""

ABSORBED = 3
"""Accepted tokens that the drafter reads at once: few, as they are after most rounds."""

LOOP_DEPTH = 5
"""Of the chains in the real loop."""

TURNS = 6
"""Of each kind of round in the real loop, one after the other: a slow moment of the machine falls on all of them."""

SPARE_ROUNDS = 4
"""That texts have room for beside these: one makes graphs, and the last of a text are cut short."""


class Turn(NamedTuple):
    """Rounds of one kind, of which the first are not timed: others have put their weights into the processor's cache.

    Graphs of a small pair hold weights of their own, so that this shows: a round among others of its kind is a quarter
    faster than the first one.
    """

    untimed: int
    timed: int

    @classmethod
    def of(cls, plan: DraftPlan, *, compiled: bool) -> Turn:
        """As such rounds come in a text: rests are long, drafts follow one another, between rests one is looked up."""
        if not compiled:
            return cls(1, 2)
        if plan.skips:
            return cls(4, 6)
        return cls(1, 2) if plan.tokens is None else cls(0, 1)


PIECES = len(CONTEXTS) + 1
"""What is measured at once: forwards behind each context, and the loop."""


def measure(drafter: Eagle31Drafter) -> Calibration:
    """Measure the pair on the machine it is on: one row, eager forwards.

    Args:
        drafter: attached.
    """
    pieces = measure_by_pieces(drafter)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def can_measure_unasked(drafter: Eagle31Drafter, *, compiled: bool) -> bool:
    """Whether it takes seconds: eager rounds, and graphs that are captured. Others would be compiled for it."""
    return not compiled or drafter.require_binding().head_device.type in CAPTURES


def measure_by_pieces(drafter: Eagle31Drafter, *, compiled: bool = False) -> Generator[None, None, Calibration]:
    """`measure` with a pause after each of its `PIECES`, through which no memory is held. Graphs are one piece."""
    if compiled:
        return measure_graphs(drafter)
    binding = drafter.require_binding()
    longest = getattr(binding.text_config, "max_position_embeddings", None) or max(CONTEXTS) + max(WIDTHS)
    room = max(longest - max(WIDTHS), 2)
    measured: list[ContextSeconds] = []
    for length in sorted({min(length, room) for length in CONTEXTS}):
        with _undisturbed():
            measured.append(_behind(drafter, length))
        yield
    with _undisturbed():
        round_s, plain_round_s = _around(drafter, measured[0])
    return Calibration(tuple(measured), round_s, plain_round_s)


def measure_graphs(
    drafter: Eagle31Drafter,
    processing: ScoreProcessing | None = None,
    *,
    sampled: bool = False,
    contexts: Sequence[int] = CONTEXTS[:1],
) -> Calibration:
    """Measure rounds of one row by graphs: with a chain, with a draft that was there already, and without.

    What is not there yet is captured on a CUDA device, and compiled elsewhere, which may take minutes.

    Args:
        drafter: attached.
        processing: of the texts to come, which graphs that draw tokens have built in.
        sampled: whether these draw.
        contexts: tokens before the rounds, rising; by default few, since every length of rows has graphs of its own.
    """
    plans, measured = _graph_plans(drafter, sampled=sampled), []
    shape = plans[0].shape
    for context in contexts:
        with _undisturbed():
            seconds = _rounds_s(drafter, context, plans, processing, sampled=sampled, compiled=True)
        chain_s, rest_s, looked_up_s = seconds
        plain_s, lookup_s, chain_s = _rising((rest_s, looked_up_s, chain_s))
        step_s = (chain_s - lookup_s) / shape.depth
        width = node_bucket(shape.nodes, shape.nodes)  # of the graph, which takes as long over fewer tokens
        measured.append(ContextSeconds(context, ((1, plain_s), (width, lookup_s)), step_s, step_s))
    return Calibration(tuple(measured), 0.0, 0.0, in_buckets=True)


def meet_graphs(
    drafter: Eagle31Drafter, processing: ScoreProcessing, *, sampled: bool, contexts: Sequence[int]
) -> None:
    """Let all graphs be made that `measure_graphs` would time, whose arguments these are."""
    for context in contexts:
        with _undisturbed():
            _begin(drafter, context, _graph_plans(drafter, sampled=sampled), processing, sampled=sampled, compiled=True)


def _graph_plans(drafter: Eagle31Drafter, *, sampled: bool) -> tuple[DraftPlan, ...]:
    """A chain, none, and one that was there already."""
    length = drafter.generation_config.draft_length(
        device_type=drafter.device.type, batch_size=1, sampled=sampled, compiled=True
    )
    shape = DraftShape(length.depth)
    return DraftPlan(shape), DraftPlan.skip(), DraftPlan(shape, tokens=((0,) * shape.depth,))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever draws afterwards draws the same as without us."""
    with torch.no_grad(), torch.random.fork_rng():
        yield


def _behind(drafter: Eagle31Drafter, length: int) -> ContextSeconds:
    meter = BareMeter(
        drafter, _text(drafter.require_binding(), length), DraftShape(depth=WIDTHS[-1] - 1), absorbed=ABSORBED
    )
    seconds = {width: meter.measure_width(width) for width in reversed(WIDTHS)}
    forward_s = tuple(zip(WIDTHS, _rising([seconds[width].verify_s for width in WIDTHS]), strict=True))
    narrow = [seconds[width] for width in WIDTHS[1:5]]
    return ContextSeconds(length, forward_s, _median("drafter_step_s", narrow), _median("absorb_s", narrow))


def _rising(seconds: Sequence[float]) -> list[float]:
    """Without what noise alone can have made: less work that takes longer than more."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _median(figure: str, rounds: list[WidthSeconds]) -> float:
    return median(getattr(each, figure) for each in rounds)


class AlwaysTheSame(DraftPolicy):
    """One plan."""

    def __init__(self, plan: DraftPlan):
        self.plan = plan

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The plan."""
        return self.plan

    def record(self, stats: RoundStats) -> None:
        """Learns nothing."""


def _around(drafter: Eagle31Drafter, bare: ContextSeconds) -> tuple[float, float]:
    """Seconds of a round beyond its forwards, with a chain and without."""
    forward_s, shape = dict(bare.forward_s), DraftShape(LOOP_DEPTH)
    drafted = bare.absorb_s + (LOOP_DEPTH - 1) * bare.drafter_step_s
    chain_s = drafted + max(s for width, s in bare.forward_s if width <= LOOP_DEPTH + 3)
    drafting, plain = _rounds_s(drafter, bare.context, (DraftPlan(shape), DraftPlan.skip()))
    round_s = max(drafting - chain_s, 0.0)
    # A round without drafts does nothing that one with them does not do: what says otherwise was disturbed.
    return round_s, min(max(plain - forward_s[1], 0.0), round_s)


def _rounds_s(
    drafter: Eagle31Drafter,
    context: int,
    plans: Sequence[DraftPlan],
    processing: ScoreProcessing | None = None,
    *,
    sampled: bool = False,
    compiled: bool = False,
) -> list[float]:
    """Median seconds of the loop's own rounds by each of the plans, the first of which is the largest."""
    decoders = _begin(drafter, context, plans, processing, sampled=sampled, compiled=compiled)
    turns = [Turn.of(plan, compiled=compiled) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    with drafter.require_binding().masked_attention():
        for _ in range(TURNS):
            for decoder, turn, found in zip(decoders, turns, seconds, strict=True):
                rounds_s = [_timed_step(decoder) for _ in range(turn.untimed + turn.timed)]
                found += rounds_s[turn.untimed :]
    return [median(found) for found in seconds]


def _begin(
    drafter: Eagle31Drafter,
    context: int,
    plans: Sequence[DraftPlan],
    processing: ScoreProcessing | None,
    *,
    sampled: bool,
    compiled: bool,
) -> list[SpeculativeDecoder]:
    """A text for each of the plans, of which one round is made: with room for all that are timed."""
    binding, decoders = drafter.require_binding(), []
    for plan in plans:
        rounds = TURNS * sum(Turn.of(plan, compiled=compiled)) + SPARE_ROUNDS
        rules = StopRules(max_length=context + rounds * plan.shape.nodes)
        request = DecodingRequest(
            sequences=Sequences(_text(binding, context), [0], rules, None),
            processing=processing or ScoreProcessing(LogitsProcessorList()),
            shape=plans[0].shape,
            policy=AlwaysTheSame(plan),
            do_sample=sampled,
            graph_maker=_maker(binding),
        )
        decoders.append(SpeculativeDecoder(drafter, request, compiled=compiled))
    with binding.masked_attention():
        for decoder in decoders:
            decoder.prefill()
            decoder.step()
    return decoders


def _maker(binding: TargetBinding) -> GraphMaker:
    capture = CAPTURES.get(binding.head_device.type)
    return binding.ahead or (CompilesAtOnce() if capture is None else CapturesSteps(capture))


def _timed_step(decoder: SpeculativeDecoder) -> float:
    device = decoder.binding.head_device
    started = now(device)
    decoder.step()
    return now(device) - started


def _text(binding: TargetBinding, length: int) -> Tensor:
    """Ids `(1, length)`: any do, since what a forward takes does not depend on them."""
    config: Any = binding.text_config
    return (torch.arange(length)[None] * 7 % config.vocab_size).to(binding.input_device)
