"""One `generate` call as it reaches us, and what our own loop wants to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..decoding.policy_choice import DraftWish
from ..drafter.drafter import Eagle31Drafter
from ..errors import UnsupportedGenerationError
from .stock_loop import draft_length


@dataclass(frozen=True)
class Call:
    """One `generate` call as it reaches us, everything prepared."""

    model: Any
    drafter: Eagle31Drafter
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]


def draft_wish(call: Call) -> DraftWish:
    """What the call and the drafter's `generation_config` ask of drafts."""
    wishes, rows = call.drafter.generation_config, call.input_ids.shape[0]
    length = draft_length(call.drafter, call.generation_config, batch_size=rows)
    shortest, longest = wishes.steered_bounds(length.depth)
    return DraftWish(
        shape=wishes.draft_shape(replace(length, depth=longest)),
        start=min(max(length.depth, shortest), longest),
        rows=rows,
        context=call.input_ids.shape[1],
        sampled=bool(call.generation_config.do_sample),
        compiled=wishes.acceleration == "compile",
    )


def left_padding(call: Call) -> list[int]:
    """Pads in front of each row.

    Raises:
        UnsupportedGenerationError: a mask has holes or pads on the right.
    """
    rows, length = call.input_ids.shape
    mask = call.model_kwargs.get("attention_mask")
    if mask is None:
        return [0] * rows
    mask = mask[:, -length:].bool()
    padding = length - mask.sum(dim=1)
    columns = torch.arange(length, device=mask.device)
    if not torch.equal(mask, columns >= padding[:, None]) or int(padding.max()) >= length:
        raise UnsupportedGenerationError(
            "the attention mask has pads behind or between tokens (or a row without any token); pad prompts on the "
            "left: tokenizer.padding_side = 'left'"
        )
    return padding.tolist()


def text_length(call: Call) -> int:
    """Tokens of the whole text, of which `input_ids` may be the new ones only."""
    mask, positions = call.model_kwargs.get("attention_mask"), call.model_kwargs.get("position_ids")
    if mask is not None:
        return mask.shape[1]
    # transformers 5.23 drops a mask of ones (5.17 does not); the positions it made from it are still there.
    return call.input_ids.shape[1] if positions is None else int(positions[..., -1].max()) + 1


def streaming(streamer: Any) -> Callable[[int, list[int]], None] | None:
    if streamer is None:
        return None
    # A 1-D block: stock streamers take it whole and count it right.
    return lambda _row, tokens: streamer.put(torch.tensor(tokens)) if tokens else None
