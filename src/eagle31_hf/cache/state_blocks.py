"""How a block passes through layers with states, in words: who reads it, what it leaves, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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

    def through(self, change: Callable[[str, Tensor], Tensor]) -> BlockTrace:
        """The same with each tensor changed, which is told by a name."""
        recorded = self.recorded
        if recorded is not None:
            recorded = recorded[0], tuple([change(f"input {i}", each) for i, each in enumerate(recorded[1])])
        return BlockTrace(
            tuple([(key, change(f"nodes {key}", state)) for key, state in self.nodes]),
            tuple([(key, change(f"windows {key}", columns)) for key, columns in self.windows]),
            recorded,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order always."""
        recorded = () if self.recorded is None else self.recorded[1]
        return [*(state for _, state in self.nodes), *(columns for _, columns in self.windows), *recorded]


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
