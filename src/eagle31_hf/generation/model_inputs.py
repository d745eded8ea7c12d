"""What a `generate` call hands to the model itself, and which loop would let it arrive.

Our loop places tokens, masks and positions on its own. What else belongs to the prompt (a picture) the model reads in
its own first forward (`PromptForward`), and whether our rounds go on from there is tried (`continuation`). What
our loop knows nothing of has to go by another one, or the text would silently be another one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..cache.stock import held_length
from ..errors import UnsupportedGenerationError
from ..target.cache_argument import CACHE_ARGUMENT, OF_STATES_ALONE
from ..target.prompt_forward import PromptForward
from .call import Call

PLACED_BY_OUR_LOOP = {
    CACHE_ARGUMENT,
    OF_STATES_ALONE,
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "position_ids",
    "use_cache",
}
READ_WITH_THE_PROMPT = {
    "feature_attention_mask",
    "image_grid_thw",
    "image_sizes",
    "input_features",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "second_per_grid_ts",
    "token_type_ids",
    "video_grid_thw",
}
"""What models want in their first forward only. Each is in a test; a name that is not here goes by another loop."""


def beside_tokens(call: Call) -> list[str]:
    """Names of what the model is given with the prompt that our loop does not place itself."""
    given = {name for name, value in call.model_inputs.items() if not _is_nothing(value)} - PLACED_BY_OUR_LOOP
    if _has_axes_of_its_own(call):
        given.add("position_ids")
    return sorted(given)


def why_not_our_loop(call: Call) -> str | None:
    """Inputs that our loop would not hand on."""
    given = beside_tokens(call)
    if others := [name for name in given if name not in {*READ_WITH_THE_PROMPT, "position_ids"}]:
        return f"the model is given {', '.join(others)}, which our loop does not hand on"
    cached = 0 if call.cache is None else held_length(call.cache)
    if given and cached:
        return f"the model is given {', '.join(given)} behind a cache that holds text already"
    if given and call.generation_config.prefill_chunk_size is not None:
        return f"the model is given {', '.join(given)}, which our loop does not read in chunks"
    if cached and _has_placeholders(call):
        return "the prompt's pictures are in the cache that was passed, and our loop might have to read them again"
    return None


def prompt_forward(call: Call, padding: list[int]) -> PromptForward | None:
    """How the model reads the prompts itself; `None` where they are tokens and nothing else."""
    return PromptForward(call.input_ids, padding, call.model_inputs) if beside_tokens(call) else None


def why_no_draft(call: Call) -> str | None:
    """Inputs that only one forward per token, prepared by the model, treats right."""
    if why := _why_not_padded_left(call):
        return why
    if _has_positions_of_its_own(call.position_ids, call.attention_mask):
        return "position_ids are not those of the text"
    if call.text_length > call.input_ids.shape[1] and (call.cache is None or held_length(call.cache) == 0):
        return "the attention mask is longer than the prompts, and no cache holds what comes before them"
    if "prepare_inputs_for_generation" in vars(call.model):  # PEFT's prefix and prompt tuning
        return "the model's inputs are prepared by an adapter (prompt or prefix tuning)"
    if call.batch_size > 1 and _has_adapters_by_row(call.model):
        return "adapter_names gives each row of the batch its adapter"
    return None


def left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Pads in front of each row.

    Raises:
        UnsupportedGenerationError: a mask has holes or pads on the right.
    """
    rows, length = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    mask = attention_mask[:, -length:].bool()
    padding = length - mask.sum(dim=1)
    columns = torch.arange(length, device=mask.device)
    if not torch.equal(mask, columns >= padding[:, None]) or int(padding.max()) >= length:
        raise UnsupportedGenerationError(
            "the attention mask has pads behind or between tokens (or a row without any token); pad prompts on the "
            "left: tokenizer.padding_side = 'left'"
        )
    return padding.tolist()


def _why_not_padded_left(call: Call) -> str | None:
    """Pads where only the model's own forwards, token by token, treat them as plain `generate` does.

    A mask that is too short no loop can read: our own says so.
    """
    if call.text_length < call.input_ids.shape[1]:
        return None
    try:
        left_padding(call.input_ids, call.attention_mask)
    except UnsupportedGenerationError as error:
        return str(error)
    return None


def _is_nothing(value: Any) -> bool:
    """`None`, or outputs of encoders (`mm_encoder_outputs`) none of which had anything to read."""
    return value is None or (isinstance(value, Mapping) and all(_is_nothing(part) for part in value.values()))


def _has_axes_of_its_own(call: Call) -> bool:
    """Whether positions run along several axes, and along one of them otherwise than the text."""
    positions = call.position_ids
    if positions is None or positions.dim() != 3:
        return False
    rows = call.batch_size
    return any(_has_positions_of_its_own(axis.expand(rows, -1), call.attention_mask) for axis in positions)


def _has_placeholders(call: Call) -> bool:
    """Whether the prompts hold tokens that stand for pictures, films or sounds."""
    config = call.model.config
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    ids = {token for name in names if isinstance(token := getattr(config, name, None), int)}
    return bool(ids) and bool(torch.isin(call.input_ids, call.input_ids.new_tensor(sorted(ids))).any())


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
