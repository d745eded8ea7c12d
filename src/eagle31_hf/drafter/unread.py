"""What a drafter that rests will read when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Buffers(NamedTuple):
    """`aux` `(B, room, A*Ht)` and `chances` `(B, room)`, 1 where they are not known."""

    aux: Tensor
    chances: Tensor


class UnreadPositions:
    """Tokens of positions that wait to be read, and their hidden states and chances, each in one buffer.

    Kept one by one, they would lie between what each forward of the target allocates: that alone made the matrix
    products of a small one 5 % slower, and a single number kept of each forward 3 to 5 %.

    Args:
        room: most positions that may wait.
    """

    def __init__(self, room: int):
        self.room, self.count = room, 0
        self._tokens: list[list[int]] = []  # of each row
        self._buffers: _Buffers | None = None

    def fits(self, width: int) -> bool:
        """Whether there is room for so many more."""
        return self.count + width <= self.room

    def add(self, tokens: Sequence[Sequence[int]], aux: Tensor, chances: Tensor | None = None) -> None:
        """Keep copies, behind those that wait.

        Args:
            tokens: `T` of each row.
            aux: hidden states `(B, T, A*Ht)`.
            chances: `(B, T)` the target's probability of each token; `None`: not known, so no more than 1.
        """
        if not self.count:
            self._make_room(aux)
        for row, more in zip(self._tokens, tokens, strict=True):
            row.extend(more)
        width = aux.shape[1]
        held = _Buffers(*(buffer.narrow(1, self.count, width) for buffer in self._held))
        held.aux.copy_(aux)
        held.chances.fill_(1.0) if chances is None else held.chances.copy_(chances)
        self.count += width

    def _make_room(self, aux: Tensor) -> None:
        """Buffers for such rows: those of before, if they were like these."""
        rows, _, width = aux.shape
        held = None if self._buffers is None else self._buffers.aux
        self._tokens = [[] for _ in range(rows)]
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, width)):
            chances = aux.new_empty(rows, self.room, dtype=torch.float32)
            self._buffers = _Buffers(aux.new_empty(rows, self.room, width), chances)

    @property
    def _held(self) -> _Buffers:
        assert self._buffers is not None, "nothing waits"
        return self._buffers

    @property
    def tokens(self) -> Tensor:
        """Of all that waits, `(B, n)`."""
        return torch.tensor(self._tokens, device=self._held.aux.device)

    @property
    def aux(self) -> Tensor:
        """Hidden states of all that waits, `(B, n, A*Ht)`; valid until the next `add`."""
        return self._held.aux.narrow(1, 0, self.count)

    @property
    def chances(self) -> Tensor:
        """The target's probability of each token that waits, `(B, n)`; valid until the next `add`."""
        return self._held.chances.narrow(1, 0, self.count)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.count = 0
