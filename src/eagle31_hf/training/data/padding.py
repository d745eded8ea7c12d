"""Prompts of different length as one batch for `generate`, and where its texts end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask `(B, L)`; what stands under the padding is not read."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()


def pad_token_id(model: Any) -> int:
    """The target's padding id, else its first end-of-text id, else 0."""
    for value in (model.generation_config.pad_token_id, model.generation_config.eos_token_id):
        if isinstance(value, list) and value:
            return int(value[0])
        if isinstance(value, int):
            return value
    return 0


def end_ids(model: Any) -> set[int]:
    """Tokens that end the target's texts, by its generation config."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def until_end(answer: list[int], ends: Collection[int]) -> list[int]:
    """An answer up to and with its end."""
    stop = next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))
    return answer[:stop]
