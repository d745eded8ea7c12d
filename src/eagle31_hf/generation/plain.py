"""A `generate` call served by plain decoding, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from ..stats import SpeculationStats
from .call import Call
from .output import with_stats


def write_plain(call: Call, stats: SpeculationStats) -> Any:
    """What `generate` writes without a drafter; a prompt that is read in pieces would be rotated in several ways."""
    if call.may_rotate_otherwise:
        call.generation_config.prefill_chunk_size = None
    rows_wait = any(hasattr(rule, "eos_token_id") for rule in call.stopping_criteria)  # as `_sample` has it
    counting = CountingCriteria(call.stopping_criteria, rows_wait=rows_wait)
    output: Any = GenerationMixin._sample(
        call.model,
        call.input_ids,  # type: ignore[arg-type]
        logits_processor=call.logits_processor,
        stopping_criteria=counting,
        generation_config=call.generation_config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_inputs,
    )
    stats.new_tokens = counting.new_tokens
    return with_stats(output, stats)


class CountingCriteria(StoppingCriteriaList):
    """The same criteria, which count what is written on the way: a row that waits, filled up with pads, gets nothing.

    Args:
        criteria: as the loop would ask them, once per token.
        rows_wait: whether a row that has ended waits for the others; without an end-of-sequence token all write on.
    """

    def __init__(self, criteria: StoppingCriteriaList, *, rows_wait: bool):
        super().__init__(criteria)
        self._rows_wait = rows_wait
        self._ended: Tensor | None = None
        self._new_tokens = torch.zeros((), dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Which rows `(B,)` end with their last token."""
        ends: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        ended = torch.zeros_like(ends) if self._ended is None else self._ended
        waiting = ended if self._rows_wait else ended.all().expand_as(ended)
        self._new_tokens = self._new_tokens.to(ends.device) + (~waiting).sum()
        self._ended = ended | ends
        return ends

    @property
    def new_tokens(self) -> int:
        """Written so far, summed over rows; waits for the device."""
        return int(self._new_tokens)
