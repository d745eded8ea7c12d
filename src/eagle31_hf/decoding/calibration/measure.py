"""Measure a calibration: single forwards at several widths and two contexts, then the loop around them. Seconds."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...drafter.drafter import Eagle31Drafter
from ...generation_config import COMPILED_DEPTH
from ...sampling.logits_processing import ScoreProcessing
from ...target.binding import TargetBinding
from ...target.device_clock import now
from ...trees.shape import DraftShape
from ..decoder import SpeculativeDecoder
from ..draft_policy import DraftPlan, RoundState, RoundStats
from ..request import DecodingRequest
from ..text import Sequences, StopRules
from .bare_meter import BareMeter, WidthSeconds
from .calibration import Calibration, ContextSeconds

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
COMPILED_WIDTHS = (1, COMPILED_DEPTH + 1)
CONTEXTS = (64, 768)
"""Tokens before a round. Compiled steps are measured behind the first: every length of rows is a graph of its own."""

ABSORBED = 3
"""Accepted tokens that the drafter reads at once: few, as they are after most rounds."""

LOOP_ROUNDS, LOOP_DEPTH = 10, 5
"""Rounds of the real loop, with a chain and without."""

PIECES = len(CONTEXTS) + 1
"""What is measured at once: forwards behind each context, and the loop."""


def measure(drafter: Eagle31Drafter, *, compiled: bool = False) -> Calibration:
    """Measure the pair on the machine it is on: one row, eager forwards or compiled ones.

    What is not there yet is compiled, which may take minutes.

    Args:
        drafter: attached.
        compiled: measure the steps of `acceleration="compile"`.
    """
    pieces = measure_by_pieces(drafter, compiled=compiled)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def measure_by_pieces(drafter: Eagle31Drafter, *, compiled: bool = False) -> Generator[None, None, Calibration]:
    """`measure` with a pause after each of its `PIECES`, through which no memory is held."""
    binding = drafter.require_binding()
    longest = getattr(binding.text_config, "max_position_embeddings", None) or max(CONTEXTS) + max(WIDTHS)
    room = max(longest - max(WIDTHS), 2)
    contexts = CONTEXTS[:1] if compiled else CONTEXTS
    measured: list[ContextSeconds] = []
    for length in sorted({min(length, room) for length in contexts}):
        with _undisturbed():
            measured.append(_behind(drafter, length, compiled=compiled))
        yield
    with _undisturbed():
        round_s, plain_round_s = _around(drafter, measured[0], compiled=compiled)
    return Calibration(tuple(measured), round_s, plain_round_s, in_buckets=compiled)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever draws afterwards draws the same as without us."""
    with torch.no_grad(), torch.random.fork_rng():
        yield


def _behind(drafter: Eagle31Drafter, length: int, *, compiled: bool) -> ContextSeconds:
    widths = COMPILED_WIDTHS if compiled else WIDTHS
    shape = DraftShape(depth=widths[-1] - 1)
    context = _text(drafter.require_binding(), length)
    meter = BareMeter(drafter, context, shape, compiled=compiled, absorbed=ABSORBED)
    seconds = {width: meter.measure_width(width) for width in reversed(widths)}  # a compiled width 1 uses a wider graph
    forward_s = tuple(zip(widths, _rising([seconds[width].verify_s for width in widths]), strict=True))
    narrow = [seconds[width] for width in widths[1:5]]
    return ContextSeconds(length, forward_s, _median("drafter_step_s", narrow), _median("absorb_s", narrow))


def _rising(seconds: Sequence[float]) -> list[float]:
    """Without what noise alone can have made: a narrow forward that takes longer than a wider one."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _median(figure: str, rounds: list[WidthSeconds]) -> float:
    return median(getattr(each, figure) for each in rounds)


class AlwaysTheSame:
    """A `DraftPolicy` of one plan."""

    def __init__(self, plan: DraftPlan):
        self.plan = plan

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The plan."""
        return self.plan

    def record(self, stats: RoundStats) -> None:
        """Learns nothing."""


def _around(drafter: Eagle31Drafter, bare: ContextSeconds, *, compiled: bool) -> tuple[float, float]:
    """Seconds of a round beyond its forwards, with a chain and without."""
    depth = COMPILED_DEPTH if compiled else LOOP_DEPTH
    forward_s = dict(bare.forward_s)
    drafted = bare.absorb_s + (depth - 1) * bare.drafter_step_s
    chain_s = drafted + forward_s.get(depth + 1, max(s for width, s in bare.forward_s if width <= depth + 3))
    drafting = _round_s(drafter, bare.context, DraftPlan(DraftShape(depth=depth)), compiled=compiled)
    plain = _round_s(drafter, bare.context, DraftPlan.skip(), compiled=compiled)
    round_s = max(drafting - chain_s, 0.0)
    # A round without drafts does nothing that one with them does not do: what says otherwise was disturbed.
    return round_s, min(max(plain - forward_s[1], 0.0), round_s)


def _round_s(drafter: Eagle31Drafter, context: int, plan: DraftPlan, *, compiled: bool) -> float:
    """Median seconds of the loop's own rounds by one plan."""
    depth = max(plan.shape.depth, COMPILED_DEPTH if compiled else LOOP_DEPTH)
    prompt = _text(drafter.require_binding(), context)
    rules = StopRules(max_length=context + (LOOP_ROUNDS + 4) * (depth + 1))
    request = DecodingRequest(
        sequences=Sequences(prompt, [0], rules, None),
        processing=ScoreProcessing(LogitsProcessorList()),
        shape=DraftShape(depth=depth),
        policy=AlwaysTheSame(plan),
    )
    decoder = SpeculativeDecoder(drafter, request, compiled=compiled)
    device, seconds = drafter.require_binding().head_device, []
    with drafter.require_binding().masked_attention():
        decoder.prefill()
        for _ in range(LOOP_ROUNDS + 2):
            started = now(device)
            decoder.step()
            seconds.append(now(device) - started)
    return median(seconds[2:])


def _text(binding: TargetBinding, length: int) -> Tensor:
    """Ids `(1, length)`: any do, since what a forward takes does not depend on them."""
    config: Any = binding.text_config
    return (torch.arange(length)[None] * 7 % config.vocab_size).to(binding.input_device)
