"""A `generate` call served by transformers' own loops: its assisted one with our candidates, or one token at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from ..decoding.memory_ladder import is_out_of_memory
from ..stats import SpeculationStats
from .call import Call
from .output import with_stats

logger = logging.getLogger(__name__)


def write_plain(call: Call, stats: SpeculationStats) -> Any:
    """What `generate` writes without a drafter."""
    output: Any = GenerationMixin._sample(
        call.model,
        call.input_ids,  # type: ignore[arg-type]
        logits_processor=call.logits_processor,
        stopping_criteria=call.stopping_criteria,
        generation_config=call.generation_config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_inputs,
    )
    stats.new_tokens = count_written(call, getattr(output, "sequences", output))
    return with_stats(output, stats)


def count_written(call: Call, ids: Tensor) -> int:
    """New tokens of `ids` `(B, L + n)`, summed over rows: what fills up an ended row was not written."""
    ends = torch.tensor(sorted(call.rules.eos_ids), device=ids.device)
    new = ids[:, call.input_ids.shape[1] :]
    if ends.numel() == 0 or new.numel() == 0:  # without an end-of-sequence token no row waits for the others
        return new.numel()
    is_end = torch.isin(new, ends)
    first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, new.shape[1])
    pad = getattr(call.generation_config, "_pad_token_tensor", None)
    if pad is None:
        return int(first_end.sum())
    written = (new != pad).int().cumsum(1).argmax(1) + 1  # up to the last token that is no padding
    return int(torch.where(is_end.any(1), first_end, written).sum())


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
    stats.new_tokens = count_written(call, getattr(output, "sequences", output))
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
