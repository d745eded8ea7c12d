"""What a drafter that rests will read when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..trees.host_numbers import on_device


class UnreadPositions:
    """Tokens of positions that wait to be read, and their hidden states in one buffer.

    Kept one by one, they would lie between what each forward of the target allocates: that alone made the matrix
    products of a small one 5 % slower.

    Args:
        room: most positions that may wait.
    """

    def __init__(self, room: int):
        self.room, self.count = room, 0
        self._tokens: list[list[int]] = []  # of each row
        self._buffer: Tensor | None = None  # (B, room, A*Ht)

    def fits(self, width: int) -> bool:
        """Whether there is room for so many more."""
        return self.count + width <= self.room

    def add(self, tokens: Sequence[Sequence[int]], aux: Tensor) -> None:
        """Keep copies, behind those that wait.

        Args:
            tokens: `T` of each row.
            aux: hidden states `(B, T, A*Ht)`.
        """
        if not self.count:
            self._make_room(aux)
        for row, more in zip(self._tokens, tokens, strict=True):
            row.extend(more)
        width = aux.shape[1]
        self._held.narrow(1, self.count, width).copy_(aux)
        self.count += width

    def _make_room(self, aux: Tensor) -> None:
        """A buffer for such rows: that of before, if they were like these."""
        rows, _, width = aux.shape
        held = self._buffer
        self._tokens = [[] for _ in range(rows)]
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, width)):
            self._buffer = aux.new_empty(rows, self.room, width)

    @property
    def _held(self) -> Tensor:
        assert self._buffer is not None, "nothing waits"
        return self._buffer

    @property
    def tokens(self) -> Tensor:
        """Of all that waits, `(B, n)`."""
        return on_device(self._tokens, self._held.device)

    @property
    def aux(self) -> Tensor:
        """Hidden states of all that waits, `(B, n, A*Ht)`; valid until the next `add`."""
        return self._held.narrow(1, 0, self.count)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.count = 0
