"""Compiling a pair's graphs ahead: rounds of every kind, behind prompts of every length that graphs are made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cache import graph_sizes
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.plan import REST, DraftPlan
from ..drafting.shape import DraftShape
from ..errors import ConfigurationError
from ..graphs.graphs import Graphs
from ..graphs.steps import GraphKey
from ..loop.decoder import DecodingRequest, SpeculativeDecoder
from ..loop.kept_graphs import compile_ahead, why_unsuited
from ..loop.pair import Pair, draft_shape
from ..loop.text import Sequences, StopRules
from ..sampling.logits_processing import processing_of

__all__ = ["warm_up"]

NEW_TOKENS = 64
"""That a text may get which is written to meet graphs."""


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
        ConfigurationError: no graphs can be kept for this pair or serve these settings, or compiling failed.
    """
    pair, binding = Pair.of(drafter), drafter.binding
    model: Any = binding.model
    config = how.get("generation_config", model.generation_config)
    sampled = bool(how.get("do_sample", config.do_sample))
    depth = how.get("num_assistant_tokens") or config.num_assistant_tokens
    shape = draft_shape(drafter, rows=1, sampled=sampled, depth=depth, by_graphs=True)
    processing = processing_of(model, **how)
    if why := why_unsuited(pair, shape, processing):
        raise ConfigurationError(f"no text would load graphs under these settings: {why}")

    def meet_graphs(graphs: Graphs) -> None:
        for length in prompt_lengths(tokens):
            # Drafts as unlikely as a chain of one special token move half precision by more than graphs may be off.
            ids = torch.arange(length + shape.nodes - 1) * 7 % binding.text_config.vocab_size
            policy = EachKindOfRound(drafter, shape, tuple(ids[length:].tolist()))
            ids = ids[None, :length].to(binding.input_device)
            request = DecodingRequest(
                sequences=Sequences(ids, [0], StopRules(max_length=length + NEW_TOKENS), None),
                processing=processing,
                shape=shape,
                policy=policy,
                do_sample=sampled,
                graphs=graphs,
            )
            with torch.no_grad(), binding.masked_attention():
                decoder = SpeculativeDecoder(drafter, request)
                decoder.prefill()
                for _ in policy.plans:
                    if decoder.rows:
                        decoder.step()

    with torch.random.fork_rng(devices=[]):
        made = compile_ahead(pair, meet_graphs, on_compile)
    pair.costs.clear()  # beside compilers, and by eager code
    return made


def prompt_lengths(tokens: int) -> list[int]:
    """Prompts whose texts lie in each of the lengths that rows of caches get, up to texts of `tokens`."""
    lengths, bucket = [graph_sizes.NODE_BUCKET], graph_sizes.SLOT_BUCKET
    while bucket < tokens:
        lengths.append(bucket + 1)
        bucket *= 2
    return lengths


class EachKindOfRound:
    """A policy of a few rounds which draft nothing, what the drafter drafts, and `given` tokens, in turn."""

    def __init__(self, drafter: Assistant, shape: DraftShape, given: tuple[int, ...]):
        looked_up = DraftPlan(DraftShape(len(given)), tokens=(given,)) if shape.depth else REST
        drafted = DraftPlan(shape) if isinstance(drafter, Eagle31Drafter) else looked_up
        self.plans = REST, looked_up, drafted, drafted, looked_up, drafted, REST, drafted
        self._rounds = 0

    def next_draft(self, *_state: Any) -> DraftPlan:
        """The next one."""
        return self.plans[self._rounds % len(self.plans)]

    def record(self, *_round: Any) -> None:
        """Counts, and learns nothing."""
        self._rounds += 1
