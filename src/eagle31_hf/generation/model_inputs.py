"""What a `generate` call hands to the model itself, and which loop would let it arrive.

Our loop places tokens, masks and positions on its own; whatever else the model is to be given (an image, an adapter for
each row, positions of one's own) has to go by another loop, or the text would silently be another one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .call import Call

PLACED_BY_OUR_LOOP = {
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}


def why_not_our_loop(call: Call) -> str | None:
    """Inputs that our loop would not hand on."""
    given = {name for name, value in call.model_inputs.items() if not _is_nothing(value)}
    if others := sorted(given - PLACED_BY_OUR_LOOP):
        return f"the model is given {', '.join(others)}, which our loop does not hand on"
    if call.position_ids is not None and call.position_ids.dim() != 2:
        return "the model counts positions along several axes"
    return None


def why_no_draft(call: Call) -> str | None:
    """Inputs that only one forward per token, prepared by the model, treats right."""
    if _has_positions_of_its_own(call.position_ids, call.attention_mask):
        return "position_ids are not those of the text"
    if call.text_length > call.input_ids.shape[1] and (call.cache is None or call.cache.get_seq_length() == 0):
        return "the attention mask is longer than the prompts, and no cache holds what comes before them"
    if "prepare_inputs_for_generation" in vars(call.model):  # PEFT's prefix and prompt tuning
        return "the model's inputs are prepared by an adapter (prompt or prefix tuning)"
    if call.batch_size > 1 and _has_adapters_by_row(call.model):
        return "adapter_names gives each row of the batch its adapter"
    return None


def _is_nothing(value: Any) -> bool:
    """`None`, or outputs of encoders (`mm_encoder_outputs`) none of which had anything to read."""
    return value is None or (isinstance(value, Mapping) and all(_is_nothing(part) for part in value.values()))


def _has_positions_of_its_own(positions: Tensor | None, mask: Tensor | None) -> bool:
    """Whether position ids were given that are not the ones `generate` makes from the mask."""
    if positions is None or positions.dim() != 2:
        return False
    if mask is None:  # transformers 5.23 drops a mask of ones
        expected = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return not torch.equal(positions, expected)
    if mask.dim() != 2 or mask.shape[1] != positions.shape[1]:
        return True
    expected = mask.long().cumsum(-1) - 1
    return bool(((positions != expected) & (mask != 0)).any())


def _has_adapters_by_row(model: Any) -> bool:
    """PEFT names them in pre-hooks that are planted for the call."""
    return any(
        isinstance(hook, functools.partial) and "adapter_names" in hook.keywords
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )
