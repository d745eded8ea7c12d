"""How the steps of the training-time test attend: to step-0 keys of their document, and to their own of later steps.

Two ways to the same numbers: a cache of all keys under one mask, for a GPU's fused kernels, and one that takes
document after document and reads later keys only where they are seen, for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

from ...drafter.modeling_eagle31 import AttendingCache
from ..data.packing import PackedBatch


def holds_scores(device: torch.device) -> bool:
    """Whether scores in memory (`DocumentCache`) are faster there than a fused kernel over masked keys."""
    return device.type == "cpu"


def attention_masks(batch: PackedBatch, steps: int, dtype: torch.dtype) -> Tensor:
    """`(B, 1, T, steps * T)` additive: causal within the document for step 0, then one diagonal per later step."""
    length = batch.input_ids.shape[1]
    row = torch.arange(length, device=batch.input_ids.device)
    causal = row[:, None] >= row[None, :]  # (T, T)
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]  # (B, T, T)
    diagonal = (row[:, None] == row[None, :]).expand_as(same)
    visible = torch.cat([causal & same, *[diagonal] * (steps - 1)], dim=-1)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def document_lengths(batch: PackedBatch) -> list[int]:
    """Tokens of each document, row after row; padding is a document like any other."""
    starts = (batch.position_ids.flatten() == 0).nonzero().squeeze(1)
    return starts.diff(append=starts.new_tensor([batch.position_ids.numel()])).tolist()


class DocumentCache(AttendingCache):
    """Keys of step 0 document by document, those of later steps only where they are read: row `i` sees its own alone.

    `S` times the keys of all documents of a row, nearly all of them masked out, are most of a step's time on a CPU.
    Scores of one document are held in memory, `(n, t, t)`, so on a GPU the fused kernel over all keys is the
    better way.

    Args:
        lengths: tokens of each document, as `document_lengths` gives them.
    """

    def __init__(self, lengths: Sequence[int]):
        self._lengths = list(lengths)
        self._keys: dict[int, list[Tensor]] = {}  # per layer and step (n, B*T, d)
        self._values: dict[int, list[Tensor]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, layer_idx: int
    ) -> Tensor:
        """See `AttendingCache`; the documents' lengths say what a mask would."""
        assert attention_mask is None, "documents are kept apart already"
        batch, groups = query.shape[0], query.shape[1] // key.shape[1]
        keys, values = self._keys.setdefault(layer_idx, []), self._values.setdefault(layer_idx, [])
        keys.append(_side_by_side(repeat_kv(key, groups)))
        values.append(_side_by_side(repeat_kv(value, groups)))
        out = self._attend_by_document(_side_by_side(query), keys, values)
        return out.unflatten(1, (batch, -1)).transpose(0, 1)  # (B, n, T, d)

    def _attend_by_document(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """`query` and each step's keys and values `(n, B*T, d)` -> `(n, B*T, d)`."""
        query = query * query.shape[-1] ** -0.5
        later_scores = [(query * later).sum(-1, keepdim=True) for later in keys[1:]]
        own = torch.cat([query[..., :0], *later_scores], dim=-1)  # (n, B*T, s)
        longest = max(self._lengths)
        hidden = query.new_full((longest, longest), torch.finfo(query.dtype).min).triu(1)  # what comes later
        attended, own_weights = [], []
        documents = (states.split(self._lengths, dim=1) for states in (query, keys[0], values[0], own))
        for q, k, v, own_scores in zip(*documents, strict=True):
            length = q.shape[1]
            scores = torch.baddbmm(hidden[:length, :length], q, k.transpose(1, 2))  # (n, t, t)
            weights = torch.cat((scores, own_scores), dim=-1).softmax(-1).to(v.dtype)  # (n, t, t + s)
            attended.append(weights[..., :length] @ v)
            own_weights.append(weights[..., length:])
        out, weights = torch.cat(attended, dim=1), torch.cat(own_weights, dim=1)
        for step, later in enumerate(values[1:]):
            out = out + weights[..., step, None] * later
        return out


def _side_by_side(states: Tensor) -> Tensor:
    """`(B, n, T, d)` as `(n, B*T, d)`: rows one after another."""
    return states.transpose(0, 1).flatten(1, 2)
