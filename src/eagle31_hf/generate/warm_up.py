"""Compiling a pair's graphs ahead: short texts of every length that graphs are made for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache import graph_sizes
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.plan import DraftPlan, RoundState, RoundStats
from ..drafting.shape import DraftShape
from ..errors import ConfigurationError
from ..graphs.captured import CAPTURES
from ..graphs.steps import GraphKey
from ..loop.decoder import DecodingRequest, SpeculativeDecoder
from ..loop.drafting import draft_shape
from ..loop.kept_graphs import compiling_ahead, refusal, why_unsuited
from ..loop.pair import Pair, current_graphs, last_graphs
from ..loop.text import Sequences, StopRules
from ..sampling.logits_processing import ScoreProcessing, processing_of
from .call import Call

logger = logging.getLogger(__name__)

__all__ = ["warm_up"]


def warm_up(
    drafter: Assistant, *, tokens: int, on_compile: Callable[[GraphKey], None] = lambda key: None, **how: Any
) -> list[GraphKey]:
    """Compile what texts of up to `tokens` tokens take, and keep it for `acceleration="auto"`.

    Args:
        drafter: attached, or `NoDrafter`, whose drafts are looked up; its settings say what is drafted.
        tokens: prompt and answer.
        on_compile: told of each graph before it is compiled.
        how: what later calls pass to `generate` beside prompts and lengths; graphs that draw tokens have it built in.

    Returns:
        What was compiled; graphs that were kept before are left alone.

    Raises:
        ConfigurationError: no graphs can be kept for this pair, or compiling failed.
    """
    model: Any = drafter.binding.model
    config = how.get("generation_config", model.generation_config)
    sampled = bool(how.get("do_sample", config.do_sample))
    return compile_graphs(drafter, processing_of(model, **how), sampled=sampled, tokens=tokens, on_compile=on_compile)


def compile_graphs(
    drafter: Assistant,
    processing: ScoreProcessing,
    *,
    sampled: bool,
    tokens: int,
    on_compile: Callable[[GraphKey], None] = lambda key: None,
) -> list[GraphKey]:
    """The same for texts of this `processing`, whose tokens are drawn or not."""
    lengths = prompt_lengths(tokens)
    with compiling_ahead(drafter, on_compile) as maker:
        maker.until_compiled(lambda: _meet_graphs(drafter, processing, sampled=sampled, contexts=lengths))
        if reason := current_graphs(drafter).disabled_reason:
            raise ConfigurationError(f"{reason}; a C++ compiler is needed (g++), and room in the cache folder")
    Pair.of(drafter).costs.clear()  # beside compilers, and by eager code
    return maker.made


def prompt_lengths(tokens: int) -> list[int]:
    """Prompts whose texts lie in each of the lengths that rows of caches get, up to texts of `tokens`."""
    lengths, bucket = [graph_sizes.NODE_BUCKET], graph_sizes.SLOT_BUCKET
    while bucket < tokens:
        lengths.append(bucket + 1)
        bucket *= 2
    return lengths


# --- rounds that meet each graph a text may want ---------------------------------------------------------------------

MOST_TOKENS = 64
"""That a text may get which is written for the graphs it meets."""


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


def _meet_graphs(drafter: Assistant, processing: ScoreProcessing, *, sampled: bool, contexts: Sequence[int]) -> None:
    """Write a few rounds of each kind behind so many tokens: with nothing drafted, by the drafter, and looked up."""
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
            processing=processing,
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


# --- when a text asks for it ------------------------------------------------------------------------------------------

_one_at_a_time = threading.Lock()

MOST_COMPILED_SETTINGS = 4
"""Sampling settings (and greedy) that texts wait for; compiling takes as long as thousands of tokens."""


def warm_up_for(call: Call, shape: DraftShape) -> str:
    """On a CPU, what `warm_up` does, before the first text that needs it.

    Args:
        shape: the largest draft by graphs.

    Returns:
        Why the text is eager all the same; empty if it is not.
    """
    drafter, binding = call.drafter, call.drafter.binding
    if Pair.of(drafter).ahead is not None:
        return ""
    if binding.head_device.type in CAPTURES:
        return ""
    if why := why_unsuited(drafter, shape, call.processing):
        return f"steps are not compiled: {why}"
    if call.batch_size > 1:
        return "steps are not compiled: graphs for a CPU serve single rows"
    sampling = bool(call.generation_config.do_sample), call.processing.draft_warping.key
    bucket = graph_sizes.slot_bucket(call.longest_text)
    with _one_at_a_time:
        graphs = current_graphs(drafter)
        wanted = torch.get_num_threads(), shape, sampling, bucket
        if wanted in graphs.warmed:
            return ""
        settings = {known for _, _, known, _ in graphs.warmed}
        if sampling not in settings and len(settings) >= MOST_COMPILED_SETTINGS:
            return (
                f"steps are not compiled: texts have waited for graphs of {len(settings)} ways to choose tokens, and "
                "this one's is another; `eagle31 warmup` makes graphs for it"
            )
        if why := refusal(drafter):
            return f"steps are not compiled: {why}"
        logger.warning("eagle31: what graphs this text lacks are compiled first, which takes minutes; they are kept")
        try:
            compile_graphs(drafter, call.processing, sampled=sampling[0], tokens=call.longest_text)
        except ConfigurationError as refused:
            return f"steps are not compiled: {refused}"
        last_graphs(drafter).warmed.add(wanted)
    return ""
