"""Compiling a pair's graphs ahead: short texts of every length that graphs are made for, written by `generate`."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..cache import graph_sizes
from ..drafter.assistant import Assistant
from ..drafting.shape import DraftShape
from ..errors import ConfigurationError
from ..graphs.captured import CAPTURES
from ..graphs.steps import GraphKey
from ..loop.kept_graphs import compiling_ahead, refusal, why_unsuited
from ..loop.meet_graphs import meet_graphs
from ..loop.pair import Pair, current_graphs, last_graphs
from ..sampling.logits_processing import processing_of
from .call import Call

logger = logging.getLogger(__name__)

__all__ = ["warm_up"]

NEW_TOKENS = 24
"""Written after each prompt: a few rounds, so that each kind of graph is met."""


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
    met: dict[str, Any] = {
        "processing": processing_of(model, **how),
        "sampled": bool(how.get("do_sample", config.do_sample)),
        "contexts": prompt_lengths(tokens),
    }

    def meet() -> None:
        for length in prompt_lengths(tokens):
            _write(drafter, length, how)
        meet_graphs(drafter, **met)

    with compiling_ahead(drafter, on_compile) as maker, torch.random.fork_rng(devices=[]):
        maker.until_compiled(meet)
        _require_graphs(drafter)
    Pair.of(drafter).costs.clear()  # beside compilers, and by eager code
    return maker.made


def _write(drafter: Assistant, length: int, how: dict[str, Any]) -> None:
    """A text behind a prompt of so many tokens."""
    binding = drafter.binding
    model: Any = binding.model
    vocabulary = binding.text_config.vocab_size
    ids = (torch.arange(length)[None] * 7 % vocabulary).to(binding.input_device)
    ended = {"eos_token_id": vocabulary, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}  # never by a token
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **ended, **how)
    _require_graphs(drafter)


def _require_graphs(drafter: Assistant) -> None:
    if reason := current_graphs(drafter).disabled_reason:
        raise ConfigurationError(f"{reason}; a C++ compiler is needed (g++), and room in the cache folder")


def prompt_lengths(tokens: int) -> list[int]:
    """Prompts whose texts lie in each of the lengths that rows of caches get, up to texts of `tokens`."""
    lengths, bucket = [graph_sizes.NODE_BUCKET], graph_sizes.SLOT_BUCKET
    while bucket < tokens:
        lengths.append(bucket + 1)
        bucket *= 2
    return lengths


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
            warm_up(drafter, tokens=call.longest_text, generation_config=_for_any_text(call))
        except ConfigurationError as refused:
            return f"steps are not compiled: {refused}"
        last_graphs(drafter).warmed.add(wanted)
    return ""


def _for_any_text(call: Call) -> Any:
    """The call's settings but for what ends its text and what it returns."""
    config = copy.deepcopy(call.generation_config)
    config.max_length = config.stop_strings = config.max_time = None
    config.num_return_sequences = 1
    config.return_dict_in_generate = config.output_scores = config.output_logits = False
    return config
