"""A `generate` call written by plain decoding, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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
    stats.new_tokens = _num_written(call, getattr(output, "sequences", output))
    return with_stats(output, stats)


def _num_written(call: Call, ids: Tensor) -> int:
    """New tokens of a text `(B, L + n)`, summed over rows: behind its end-of-sequence token a row is filled up."""
    new = ids[:, call.input_ids.shape[1] :]
    ends = [rule.eos_token_id.to(new.device) for rule in call.stopping_criteria if hasattr(rule, "eos_token_id")]
    is_end = torch.isin(new, torch.cat(ends)).long() if ends else torch.zeros_like(new)
    return int((is_end.cumsum(1) == is_end).sum())
