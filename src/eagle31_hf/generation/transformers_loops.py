"""A `generate` call served by transformers' own loops: its assisted one with our candidates, or one token at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.generation.utils import GenerationMixin

from ..decoding.memory_ladder import is_out_of_memory
from ..stats import SpeculationStats
from .call import Call
from .output import with_stats

logger = logging.getLogger(__name__)


def write_plain(call: Call, stats: SpeculationStats) -> Any:
    """What `generate` writes without a drafter."""
    output = GenerationMixin._sample(
        call.model,
        call.input_ids,  # type: ignore[arg-type]
        logits_processor=call.logits_processor,
        stopping_criteria=call.stopping_criteria,
        generation_config=call.generation_config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_inputs,
    )
    return with_stats(output, stats)


def write_stock(call: Call, stats: SpeculationStats, assisted_decoding: Callable) -> Any:
    """The same text by transformers' `assisted_decoding`, which asks us for candidates (`stock_loop`)."""
    with _advising(), call.drafter.require_binding().capturing():
        output = assisted_decoding(
            call.model,
            call.input_ids,
            call.logits_processor,
            call.stopping_criteria,
            call.generation_config,
            synced_gpus=call.synced_gpus,
            streamer=call.streamer,
            assistant_model=call.drafter,
            **call.model_inputs,
        )
    return with_stats(output, stats)


@contextmanager
def _advising() -> Iterator[None]:
    """This loop is transformers': where it runs out of memory outside the draft, nothing can be given up in time."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            logger.warning(
                "eagle31: memory ran out in the stock loop, which reads the prompt at once and cannot go on; shorten "
                "the prompt, or use a target that our own loop can serve"
            )
        raise
