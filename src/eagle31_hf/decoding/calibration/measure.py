"""Measure a calibration: whole rounds of the loop, with drafts and without, of several widths. Seconds.

Eager rounds are measured behind two contexts. Graphs have one width: no more of them are to be made for measuring.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList

from ...cache.graph_sizes import node_bucket
from ...compiled.captured import CAPTURES
from ...drafter.assistant import Assistant
from ...drafter.drafter import Eagle31Drafter
from ...drafting.plan import DraftPlan, DraftPolicy, RoundState, RoundStats
from ...sampling.logits_processing import ScoreProcessing
from ...target.device_clock import now
from ...trees.shape import DraftShape
from ..decoder import SpeculativeDecoder
from ..default_length import default_length
from ..pair import maker_at_hand
from ..request import DecodingRequest
from ..text import Sequences, StopRules
from .calibration import Calibration, ContextSeconds

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 768)
"""Tokens before a round. Graphs are measured behind the first: every length of rows is a graph of its own."""

CHAIN = 7
"""Tokens of the drafter's long drafts in eager rounds: they are as wide as one of the looked-up ones."""

TURNS = 6
"""Of all kinds of rounds, one after the other: a slow moment of the machine falls on all of them."""

SPARE_ROUNDS = 4
"""That texts have room for beside these: the first make graphs, and the last of a text are cut short."""


class TimedRounds(NamedTuple):
    """Rounds of one kind as they are timed in turns: the last ones of a turn, behind some that only come before them.

    Others have put their weights into the processor's cache. Graphs of a small pair hold weights of their own, so that
    this shows: a round among others of its kind is a quarter faster than the first one.

    Attributes:
        plans: of the rounds, one after the other and again from the first.
        untimed, timed: rounds of a turn.
    """

    plans: tuple[DraftPlan, ...]
    untimed: int = 1
    timed: int = 2

    @property
    def most_rounds(self) -> int:
        """Of a text."""
        return TURNS * (self.untimed + self.timed) + SPARE_ROUNDS


PIECES = len(CONTEXTS)
"""What is measured at once: rounds behind each context."""


def measure(drafter: Eagle31Drafter) -> Calibration:
    """Measure the pair on the machine it is on: one row, eager rounds.

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
    return not compiled or drafter.binding.head_device.type in CAPTURES


def measure_by_pieces(drafter: Eagle31Drafter, *, compiled: bool = False) -> Generator[None, None, Calibration]:
    """`measure` with a pause between its `PIECES`, through which no memory is held. Graphs are one piece."""
    if compiled:
        return measure_graphs(drafter)
    binding = drafter.binding
    longest = getattr(binding.text_config, "max_position_embeddings", None) or max(CONTEXTS) + max(WIDTHS)
    longest = min(longest, binding.rotates_alike_up_to or longest)  # behind it the target would be left otherwise
    room = max(longest - _most_written(), 2)
    measured: list[ContextSeconds] = []
    for length in sorted({min(length, room) for length in CONTEXTS}):
        if measured:
            yield
        with _undisturbed():
            measured.append(_behind(drafter, length))
    return Calibration(tuple(measured), 0.0, 0.0)


def measure_graphs(
    drafter: Assistant,
    processing: ScoreProcessing | None = None,
    *,
    sampled: bool = False,
    contexts: Sequence[int] = CONTEXTS[:1],
) -> Calibration:
    """Measure rounds of one row by graphs: with a chain, with a draft that was there already, without, and with a chain
    behind another round. Without a drafter drafts are always there already.

    What is not there yet is captured on a CUDA device, and compiled elsewhere while somebody compiles ahead.

    Args:
        drafter: attached; one that drafts at all, or looks drafts up.
        processing: of the texts to come, which graphs that draw tokens have built in.
        sampled: whether these draw.
        contexts: tokens before the rounds, rising; by default few, since every length of rows has graphs of its own.
    """
    kinds, measured = _graph_rounds(drafter, sampled=sampled), []
    shape, exact = kinds[0].plans[0].shape, maker_at_hand(drafter).exact_sizes
    width = node_bucket(shape.nodes, shape.nodes, exact=exact)  # of the graph
    for context in contexts:
        with _undisturbed():
            seconds = TextsToTime(drafter, context, processing, sampled=sampled, compiled=True).seconds(kinds)
        if isinstance(drafter, Eagle31Drafter):
            measured.append(_with_drafts(context, seconds, width, shape.depth))
        else:
            plain_s, lookup_s = _rising(seconds[::-1])
            measured.append(ContextSeconds(context, ((1, plain_s), (width, lookup_s)), 0.0, 0.0))
    return Calibration(tuple(measured), 0.0, 0.0, in_buckets=not exact)


def _with_drafts(context: int, seconds: Sequence[float], width: int, depth: int) -> ContextSeconds:
    """By rounds of each kind that `_graph_rounds` names."""
    chain_s, rest_s, looked_up_s, resumed_s = seconds
    plain_s, lookup_s, chain_s = _rising((rest_s, looked_up_s, chain_s))
    step_s = (chain_s - lookup_s) / depth
    return ContextSeconds(
        context, ((1, plain_s), (width, lookup_s)), step_s, step_s, resume_s=max(resumed_s - chain_s, 0.0)
    )


def meet_graphs(drafter: Assistant, processing: ScoreProcessing, *, sampled: bool, contexts: Sequence[int]) -> None:
    """Let all graphs be made that `measure_graphs` would time, whose arguments these are."""
    for context in contexts:
        with _undisturbed():
            texts = TextsToTime(drafter, context, processing, sampled=sampled, compiled=True)
            texts.begin(_graph_rounds(drafter, sampled=sampled))


def _graph_rounds(drafter: Assistant, *, sampled: bool) -> tuple[TimedRounds, ...]:
    """With a draft, with none, with one that was there already, and with a draft behind such a one.

    As they come in a text: drafts follow one another, rests are long, between drafts one is looked up.
    """
    length = default_length(drafter, batch_size=1, sampled=sampled, compiled=True)
    if not isinstance(drafter, Eagle31Drafter):
        return _rounds_without_drafter(DraftShape(length.depth))
    shape = drafter.generation_config.draft_shape(length)
    drafted, rest = DraftPlan(shape), DraftPlan.skip()
    looked_up = DraftPlan(DraftShape(shape.nodes - 1), tokens=((0,) * (shape.nodes - 1),))
    return (
        TimedRounds((drafted,)),
        TimedRounds((rest,), 4, 6),
        TimedRounds((looked_up,), 0, 1),
        TimedRounds((drafted, looked_up), 1, 1),  # the first is made before any turn
    )


def _rounds_without_drafter(shape: DraftShape) -> tuple[TimedRounds, ...]:
    rest = TimedRounds((DraftPlan.skip(),))
    if not shape.depth:
        return (rest,)
    return TimedRounds((DraftPlan(shape, tokens=((0,) * shape.depth,)),)), rest


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever draws afterwards draws the same as without us."""
    with torch.no_grad(), torch.random.fork_rng():
        yield


def _eager_rounds() -> tuple[DraftPlan, ...]:
    """Those of one turn: of each width with what is there already, then three of the drafter's, the first of which
    reads what the others have written."""
    looked_up = [DraftPlan(DraftShape(width - 1), tokens=((0,) * (width - 1),)) for width in WIDTHS[:0:-1]]
    chain, one = DraftPlan(DraftShape(CHAIN)), DraftPlan(DraftShape(1))
    return (*looked_up, DraftPlan.skip(), chain, chain, one)


def _most_written() -> int:
    """Tokens of a text, about: of most rounds nothing is accepted, and the last may be wide."""
    return (TURNS + 2) * len(_eager_rounds()) + 2 * WIDTHS[-1]


def _behind(drafter: Eagle31Drafter, length: int) -> ContextSeconds:
    plans = _eager_rounds()
    decoder = TextsToTime(drafter, length).decoder(plans, most_tokens=_most_written(), largest=plans[0].shape)
    with drafter.binding.masked_attention():
        decoder.prefill()
        seconds = [_timed_step(decoder) for _ in range((1 + TURNS) * len(plans)) if decoder.rows]
    timed = seconds[len(plans) :]
    *looked_up_s, plain_s, _, chain_s, one_s = (median(timed[at :: len(plans)]) for at in range(len(plans)))
    forward_s = dict(zip(WIDTHS, _rising([plain_s, *reversed(looked_up_s)]), strict=True))
    drafted_s = max(chain_s - forward_s[CHAIN + 1], 0.0)
    absorb_s = min(max(one_s - forward_s[2], drafted_s / CHAIN), drafted_s)
    return ContextSeconds(length, tuple(forward_s.items()), (drafted_s - absorb_s) / (CHAIN - 1), absorb_s)


def _rising(seconds: Sequence[float]) -> list[float]:
    """Without what noise alone can have made: less work that takes longer than more."""
    return list(accumulate(reversed(seconds), min))[::-1]


class InTurn(DraftPolicy):
    """These plans, one after the other and again from the first."""

    def __init__(self, *plans: DraftPlan):
        self._plans, self._rounds = plans, 0

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The next one."""
        return self._plans[self._rounds % len(self._plans)]

    def record(self, stats: RoundStats) -> None:
        """Counts, and learns nothing."""
        self._rounds += 1


@dataclass(frozen=True)
class TextsToTime:
    """Texts that are written for their rounds' seconds alone, each behind a context of so many tokens.

    Attributes:
        processing: of the texts; default: none.
        sampled, compiled: as the rounds are to be.
    """

    drafter: Assistant
    context: int
    processing: ScoreProcessing | None = None
    sampled: bool = False
    compiled: bool = False

    def seconds(self, kinds: Sequence[TimedRounds]) -> list[float]:
        """Median seconds of the loop's own rounds of each kind, the first of which drafts most."""
        decoders = self.begin(kinds)
        seconds: list[list[float]] = [[] for _ in kinds]
        with self.drafter.binding.masked_attention():
            for _ in range(TURNS):
                for decoder, kind, found in zip(decoders, kinds, seconds, strict=True):
                    rounds_s = [_timed_step(decoder) for _ in range(kind.untimed + kind.timed)]
                    found += rounds_s[kind.untimed :]
        return [median(found) for found in seconds]

    def begin(self, kinds: Sequence[TimedRounds]) -> list[SpeculativeDecoder]:
        """A text for each kind, with room for all rounds that are timed, of which so many are made that all were met
        and the first plan's comes last."""
        largest = kinds[0].plans[0].shape
        decoders = [
            self.decoder(kind.plans, most_tokens=kind.most_rounds * kind.plans[0].shape.nodes, largest=largest)
            for kind in kinds
        ]
        with self.drafter.binding.masked_attention():
            for decoder, kind in zip(decoders, kinds, strict=True):
                decoder.prefill()
                for _ in range(len(kind.plans) + 1):
                    decoder.step()
        return decoders

    def decoder(self, plans: Sequence[DraftPlan], *, most_tokens: int, largest: DraftShape) -> SpeculativeDecoder:
        """Writes at most so many tokens by rounds of these plans in turn."""
        binding = self.drafter.binding
        config: Any = binding.text_config
        # Any ids do, since what a forward takes does not depend on them.
        ids = (torch.arange(self.context)[None] * 7 % config.vocab_size).to(binding.input_device)
        request = DecodingRequest(
            sequences=Sequences(ids, [0], StopRules(max_length=self.context + most_tokens), None),
            processing=self.processing or ScoreProcessing(LogitsProcessorList()),
            shape=largest,
            policy=InTurn(*plans),
            do_sample=self.sampled,
        )
        return SpeculativeDecoder(self.drafter, request, compiled=self.compiled)


def _timed_step(decoder: SpeculativeDecoder) -> float:
    device = decoder.binding.head_device
    started = now(device)
    decoder.step()
    return now(device) - started
