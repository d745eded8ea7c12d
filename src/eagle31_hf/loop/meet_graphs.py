"""Rounds of every kind, so that each graph is met that a text may want: with a draft, without, and looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.plan import DraftPlan, RoundState, RoundStats
from ..drafting.shape import DraftShape
from ..sampling.logits_processing import ScoreProcessing
from .decoder import SpeculativeDecoder
from .drafting import draft_shape
from .pair import Pair, current_graphs
from .request import DecodingRequest
from .text import Sequences, StopRules

MOST_TOKENS = 64
"""That such a text may get."""


class InTurn:
    """A policy of these plans, one after the other and again from the first."""

    def __init__(self, *plans: DraftPlan):
        self._plans, self._rounds = plans, 0

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The next one."""
        return self._plans[self._rounds % len(self._plans)]

    def record(self, stats: RoundStats) -> None:
        """Counts, and learns nothing."""
        self._rounds += 1


def meet_graphs(
    drafter: Assistant, processing: ScoreProcessing | None = None, *, sampled: bool = False, contexts: Sequence[int]
) -> None:
    """Write a few rounds of each kind, which draft nothing, what the drafter drafts, and what was there already.

    Graphs come from where the pair's are compiled ahead (`kept_graphs.compiling_ahead`).

    Args:
        drafter: attached; one that drafts at all, or looks drafts up.
        processing: of the texts to come, which graphs that draw tokens have built in.
        sampled: whether these draw.
        contexts: tokens before the rounds.
    """
    shape = draft_shape(drafter, rows=1, sampled=sampled, by_graphs=True)
    rest = DraftPlan.skip()
    looked_up = DraftPlan(DraftShape(shape.nodes - 1), tokens=((0,) * (shape.nodes - 1),)) if shape.depth else rest
    drafted = DraftPlan(shape) if isinstance(drafter, Eagle31Drafter) else looked_up
    plans = rest, looked_up, drafted, drafted, looked_up, drafted, rest, drafted
    config: Any = drafter.binding.text_config
    ahead = Pair.of(drafter).ahead
    for context in contexts:
        ids = (torch.arange(context)[None] * 7 % config.vocab_size).to(drafter.binding.input_device)
        request = DecodingRequest(
            sequences=Sequences(ids, [0], StopRules(max_length=context + MOST_TOKENS), None),
            processing=processing or ScoreProcessing(LogitsProcessorList()),
            shape=shape,
            policy=InTurn(*plans),
            do_sample=sampled,
            graphs=None if ahead is None else current_graphs(drafter).made_by(ahead),
        )
        with torch.no_grad(), torch.random.fork_rng(), drafter.binding.masked_attention():
            decoder = SpeculativeDecoder(drafter, request)
            decoder.prefill()
            for _ in plans:
                if decoder.rows:
                    decoder.step()
