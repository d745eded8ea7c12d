"""Prompts of different length as one batch for `generate`, and where its texts end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def generate_padded(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """Prompts, padded on the left to the longest, and what `model.generate` writes behind them, `(B, L + n)`."""
    device = model.get_input_embeddings().weight.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return model.generate(input_ids=ids, attention_mask=mask, pad_token_id=_pad_token_id(model), **options)


def _pad_token_id(model: Any) -> int:
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
