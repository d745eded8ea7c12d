"""Compiling a pair's graphs ahead: short texts of every length that graphs are made for, written by `generate`.

Then rounds by these graphs are timed: drafts adapt to what they take, and rest or look the text up where that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compiled import shapes
from ..compiled.graph_makers import GraphKey
from ..compiled.graphs import Graphs
from ..decoding.calibration.measure import measure_graphs, meet_graphs
from ..decoding.kept_graphs import compiling_ahead
from ..decoding.pair_history import PairHistory
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError
from ..target.served_processing import processing_of

NEW_TOKENS = 24
"""Written after each prompt: a few rounds, so that each kind of graph is met."""

__all__ = ["warm_up"]


def warm_up(
    drafter: Eagle31Drafter, *, tokens: int, on_compile: Callable[[GraphKey], None] = lambda key: None, **how: Any
) -> list[GraphKey]:
    """Compile what texts of up to `tokens` tokens take and calibrate it; both is kept, for `acceleration="auto"`.

    Args:
        drafter: attached; its settings say what is drafted.
        tokens: prompt and answer.
        on_compile: told of each graph before it is compiled.
        how: what later calls pass to `generate` beside prompts and lengths; graphs that draw tokens have it built in.

    Returns:
        What was compiled; graphs that were kept before are left alone.

    Raises:
        ConfigurationError: no graphs can be kept for this pair, or compiling failed.
    """
    model: Any = drafter.require_binding().model
    measuring: dict[str, Any] = {
        "processing": processing_of(model, **how),
        "sampled": bool(how.get("do_sample", model.generation_config.do_sample)),
        "contexts": prompt_lengths(tokens),
    }

    def meet() -> None:
        for length in prompt_lengths(tokens):
            _write(drafter, length, how)
        meet_graphs(drafter, **measuring)

    history = PairHistory.of(drafter)
    with compiling_ahead(drafter, on_compile) as maker, torch.random.fork_rng(devices=[]), history.learning_nothing():
        maker.until_compiled(meet)
        _require_graphs(drafter)
        measured = measure_graphs(drafter, **measuring)
    history.keep(drafter, measured, compiled=True)
    return maker.made


def _write(drafter: Eagle31Drafter, length: int, how: dict[str, Any]) -> None:
    """A text behind a prompt of so many tokens."""
    binding = drafter.require_binding()
    model: Any = binding.model
    vocabulary = binding.text_config.vocab_size
    ids = (torch.arange(length)[None] * 7 % vocabulary).to(binding.input_device)
    ended = {"eos_token_id": vocabulary, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}  # never by a token
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **ended, **how)
    _require_graphs(drafter)


def _require_graphs(drafter: Eagle31Drafter) -> None:
    if reason := Graphs.of(drafter).disabled_reason:
        raise ConfigurationError(f"{reason}; a C++ compiler is needed (g++), and room in the cache folder")


def prompt_lengths(tokens: int) -> list[int]:
    """Prompts whose texts lie in each of the lengths that rows of caches get, up to texts of `tokens`."""
    lengths, bucket = [shapes.NODE_BUCKET], shapes.SLOT_BUCKET
    while bucket < tokens:
        lengths.append(bucket + 1)
        bucket *= 2
    return lengths
