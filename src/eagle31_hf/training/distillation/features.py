"""What the drafter learns from: the target's hidden states and next-token distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...target.binding import TargetBinding


@dataclass(frozen=True)
class TargetFeatures:
    """Of packed rows: `aux` `(B, T, A*Ht)` and `logits` `(B, T, V)`, in the target's dtype."""

    aux: Tensor
    logits: Tensor


@torch.no_grad()
def compute_features(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """One target forward over packed rows `(B, T)`: positions that restart at 0 separate the documents."""
    if binding.has_states and int((position_ids == 0).sum()) > len(input_ids):
        return _features_apart(binding, input_ids, position_ids)
    with binding.masked_attention(), binding.capturing():
        output = binding.model(
            input_ids=input_ids.to(binding.input_device),
            position_ids=position_ids.to(binding.input_device),
            use_cache=False,
        )
        return TargetFeatures(aux=binding.take_aux(), logits=output.logits)


def _features_apart(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """The same where layers with states would read on from one document into the next: each is a row of its own.

    Those of similar length are read together; pads behind a document change nothing in it.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten().tolist()
    spans = list(zip(starts, [*starts[1:], input_ids.numel()], strict=True))
    alike: dict[int, list[tuple[int, int]]] = {}
    for start, end in spans:
        alike.setdefault((end - start).bit_length(), []).append((start, end))
    parts: dict[int, tuple[Tensor, ...]] = {}  # by where a document starts
    for group in alike.values():
        rows = torch.nn.utils.rnn.pad_sequence([input_ids.flatten()[slice(*span)] for span in group], batch_first=True)
        positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        apart = compute_features(binding, rows, positions)
        for row, (start, end) in enumerate(group):
            parts[start] = tuple(each[row, : end - start] for each in (apart.aux, apart.logits))
    joined = (torch.cat(column) for column in zip(*(parts[start] for start in starts), strict=True))
    return TargetFeatures(*(states.reshape(*input_ids.shape, -1) for states in joined))
