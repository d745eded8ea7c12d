"""A `generate` call written by plain decoding, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from ..loop.carried_cache import forget_other_text
from ..stats import SpeculationStats
from .call import Call, with_stats


def write_plain(call: Call, stats: SpeculationStats) -> Any:
    """What `generate` writes without a drafter; a prompt that is read in pieces would be rotated in several ways."""
    if call.may_rotate_otherwise:
        call.generation_config.prefill_chunk_size = None
    if call.cache is not None and call.text_length == call.input_ids.shape[1]:
        forget_other_text(call.cache, call.input_ids, call.drafter.binding.text_config)
    counting = CountingCriteria(call.stopping_criteria)
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
    """The same criteria, which count new tokens on the way: a row that waits, filled up with pads, gets none."""

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        # As `_sample` has it: rows wait for the others at an end-of-sequence token, and without one all write on.
        self._rows_wait = any(hasattr(rule, "eos_token_id") for rule in criteria)
        self._ended = torch.tensor(False)
        self._new_tokens = torch.tensor(0)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Which rows `(B,)` end with their last token."""
        ends: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        ended = self._ended.to(ends.device).expand_as(ends)
        waiting = ended if self._rows_wait else ended.all().expand_as(ends)
        self._new_tokens = self._new_tokens.to(ends.device) + (~waiting).sum()
        self._ended = ended | ends
        return ends

    @property
    def new_tokens(self) -> int:
        """Written so far, summed over rows; waits for the device."""
        return int(self._new_tokens)
