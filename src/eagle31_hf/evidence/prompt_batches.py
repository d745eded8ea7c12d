"""Prompts as tensors, in batches of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts as `generate` takes them: `input_ids` and `attention_mask` `(B, T)`."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def padding(self) -> list[int]:
        """Pads in front of each row."""
        return (self.input_ids.shape[1] - self.attention_mask.sum(1)).tolist()

    def to_generate(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def batches_of(prompts: Sequence[Tensor], size: int, pad_id: int) -> list[PromptBatch]:
    """Batches of exactly `size` rows over all prompts `(T,)`; the last one is filled up from the first prompts."""
    count = -(-len(prompts) // size)
    rows = [prompts[index % len(prompts)] for index in range(count * size)]
    return [_left_padded(rows[start : start + size], pad_id) for start in range(0, len(rows), size)]


def _left_padded(rows: Sequence[Tensor], pad_id: int) -> PromptBatch:
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=pad_id) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return PromptBatch(ids, mask)


def typical_context(prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Ids `(1, T)`: as many as a prompt of median length has half-way through its text."""
    length = sorted(len(prompt) for prompt in prompts)[len(prompts) // 2] + new_tokens // 2
    ids = torch.cat(list(prompts))
    return ids.repeat(-(-length // len(ids)))[None, :length]
