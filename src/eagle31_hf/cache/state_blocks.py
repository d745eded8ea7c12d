"""How a block passes through layers with states, in words: who reads it, what it leaves, and how much of it is kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..trees.host_numbers import on_device
from .block_reading import RowGroup
from .placement import Placement
from .slot_moves import DeviceCopies
from .state_tape import Recurrence

CONVOLUTION, RECURRENT = "conv_states", "recurrent_states"
StateKey = tuple[str, int]
"""Kind and number of a state: a layer may have several of a kind."""


@dataclass(frozen=True)
class MixerCall:
    """A mixer about to read tokens.

    Attributes:
        mixer: its name in the model.
        rows: which rows it reads.
        node: where its states go.
        parents: the node each row continues, or one for all rows; `None`: what is committed.
        begins: whether nothing is to be continued.
        taped: the mixer reads a whole chain at once, and its states are rebuilt from what is recorded (`state_tape`).
    """

    mixer: str
    rows: RowGroup
    node: int = 0
    parents: int | DeviceCopies | None = None
    begins: bool = False
    taped: bool = False


@dataclass(frozen=True)
class LastNodes:
    """The last node each row keeps, -1 where a row stands still."""

    nodes: Sequence[int]
    device: torch.device

    @property
    def common(self) -> int | None:
        """The node, if it is the same in all rows."""
        return self.nodes[0] if len(set(self.nodes)) == 1 else None

    @functools.cached_property
    def moving(self) -> DeviceCopies:
        """Rows that keep something, and their nodes."""
        rows = [row for row, node in enumerate(self.nodes) if node >= 0]
        return DeviceCopies(*on_device([rows, [self.nodes[row] for row in rows]], self.device).unbind())


class BlockTrace(NamedTuple):
    """What a block of drafts left in one layer, by which its states can be moved on, as tuples that a graph may give.

    Attributes:
        nodes: states after each token of a block that was stepped, `(N, B, ...)`.
        windows: convolutions' windows and the block's columns behind them, `(B, C, K + T)`.
        recorded: the recurrence and its inputs; `None` without one.
    """

    nodes: tuple[tuple[StateKey, Tensor], ...]
    windows: tuple[tuple[StateKey, Tensor], ...]
    recorded: tuple[Recurrence, tuple[Tensor, ...]] | None


class KeepsStates:
    """A cache with states in some layers: what mixers look for among the arguments of a forward."""

    @property
    def placement(self) -> Placement:
        """How layers with states read the placed block."""
        raise NotImplementedError

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of each row instead of every token."""
        raise NotImplementedError
