"""How much of a block each row keeps, as layers with states ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..trees.host_numbers import on_device
from .slot_moves import DeviceCopies


class LastNodes:
    """The last node each row keeps, -1 where a row stands still.

    Args:
        nodes: one for each row.
        device: where they are sent first.
    """

    def __init__(self, nodes: Sequence[int], device: torch.device):
        self.nodes, self.device = nodes, device
        self._copies: DeviceCopies | None = None

    @property
    def common(self) -> int | None:
        """The node, if it is known to be the same in all rows."""
        return self.nodes[0] if len(set(self.nodes)) == 1 else None

    def on(self, device: torch.device) -> Tensor:
        """The nodes there, `(B,)`."""
        if self._copies is None:
            self._copies = DeviceCopies(on_device(self.nodes, self.device))
        return self._copies.on(device)[0]

    def reach(self, num_tokens: int) -> int:
        """How many tokens of a chain somebody keeps, at most."""
        return min(max(self.nodes) + 1, num_tokens)

    def kept(self, count: int, device: torch.device) -> Tensor | None:
        """Which of a chain's first tokens each row keeps, `(B, count)`; `None`: all of them."""
        if min(self.nodes) >= count - 1:
            return None
        return torch.arange(count, device=device) <= self.on(device)[:, None]


class LastNodesInGraph(LastNodes):
    """The same where they are known when a graph is replayed: a tensor `(B,)`."""

    def __init__(self, nodes: Tensor):
        self._nodes = nodes

    @property
    def common(self) -> None:
        return None

    def on(self, device: torch.device) -> Tensor:
        return self._nodes

    def reach(self, num_tokens: int) -> int:
        return num_tokens

    def kept(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device) <= self._nodes[:, None]
