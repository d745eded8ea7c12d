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


def slot_moves(
    lengths: Sequence[int], nodes: Sequence[Sequence[int]], ring: int | None, device: torch.device
) -> SlotMoves | None:  # fmt: skip
    """Moves of layers with such a ring, or of full ones, for rows of `lengths` committed tokens that keep these nodes.

    Nodes come from behind the row's last token or, of a windowed layer, from its scratch; of a long block only the last
    `ring` of them matter. `None`: all lie where they belong.
    """
    longest = max(len(row) for row in nodes)
    moved = longest if ring is None else min(ring, longest)
    if moved == 0 or (ring is None and all(node == i for row in nodes for i, node in enumerate(row))):
        return None
    sources, targets = [], []
    for length, row in zip(lengths, nodes, strict=True):
        block = length if ring is None else ring  # its first slot
        # Counted back from the row's end, `moved <= ring` consecutive positions fall on distinct slots of the ring.
        first = 0 if ring is None else len(row) - moved
        target = [length + i if ring is None else (length + i) % ring for i in range(first, first + moved)]
        source = target.copy()
        for place, i in enumerate(range(first, first + moved)):
            if 0 <= i < len(row):
                source[place] = block + row[i]
        sources.append(source)
        targets.append(target)
    return SlotMoves(sources, targets, device)
