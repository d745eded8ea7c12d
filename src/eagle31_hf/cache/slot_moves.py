"""Which slot goes where when a row's accepted nodes become its next tokens. Host arithmetic only; no buffer here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafting.host_numbers import on_device


class DeviceCopies:
    """Small integer tensors needed on every device the layers live on; moved once, not once per layer."""

    def __init__(self, *tensors: Tensor):
        self._originals = tensors
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {tensors[0].device: tensors}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._copies:
            self._copies[device] = tuple(tensor.to(device) for tensor in self._originals)
        return self._copies[device]


class SlotMoves(DeviceCopies):
    """Copy slot `source` to slot `target`: both `(M,)` for all rows alike, or both `(B, M)` with rows `(B, 1)` third.

    Targets are distinct within a row, and a source is read before any target is written. Where a row has fewer moves
    than another it moves a slot onto itself.

    Attributes:
        start: the first target, if for all rows alike the others follow it one by one.
    """

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], device: torch.device):
        rows_alike = all(row == sources[0] for row in sources) and all(row == targets[0] for row in targets)
        first, count = targets[0][0], len(targets[0])
        self.start = first if rows_alike and targets[0] == list(range(first, first + count)) else None
        if rows_alike:
            super().__init__(*on_device([sources[0], targets[0]], device).unbind())
        else:
            rows = torch.arange(len(sources), device=device)[:, None]
            super().__init__(*on_device([sources, targets], device).unbind(), rows)


def full_moves(lengths: Sequence[int], path: Sequence[Sequence[int]], device: torch.device) -> SlotMoves | None:
    """Moves of a full layer for rows of `lengths` committed tokens that keep the nodes in `path`, one list per row."""
    if all(node == i for row in path for i, node in enumerate(row)):
        return None  # they lie where they belong already
    longest = max(len(row) for row in path)
    sources, targets = [], []
    for length, row in zip(lengths, path, strict=True):
        sources.append([length + node for node in (*row, *range(len(row), longest))])
        targets.append([*range(length, length + longest)])
    return SlotMoves(sources, targets, device)


def ring_moves(
    lengths: Sequence[int], path: Sequence[Sequence[int]], ring: int, device: torch.device
) -> SlotMoves | None:  # fmt: skip
    """Moves of a windowed layer from its scratch to its ring; of a long block only the last `ring` nodes matter."""
    moved = min(ring, max(len(row) for row in path))
    if moved == 0:
        return None
    sources, targets = [], []
    for length, row in zip(lengths, path, strict=True):
        # Counted back from the row's end, `moved <= ring` consecutive positions fall on distinct ring slots.
        indices = range(len(row) - moved, len(row))
        target = [(length + i) % ring for i in indices]
        sources.append([ring + row[i] if i >= 0 else slot for i, slot in zip(indices, target, strict=True)])
        targets.append(target)
    return SlotMoves(sources, targets, device)
