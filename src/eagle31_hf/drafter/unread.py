"""What a drafter that rests will read when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..drafting.host_numbers import on_device


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
        self._buffer: Tensor | None = None  # (B, room, A*Ht); kept for the next ones, if they are like these

    def add(self, tokens: Sequence[Sequence[int]], aux: Tensor) -> None:
        """Keep copies, behind those that wait.

        Args:
            tokens: `T` of each row.
            aux: hidden states `(B, T, A*Ht)`.
        """
        rows, width, size = aux.shape
        held = self._buffer
        if not self.count:
            self._tokens = [[] for _ in range(rows)]
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, size)):
            held = self._buffer = aux.new_empty(rows, self.room, size)
        for row, more in zip(self._tokens, tokens, strict=True):
            row.extend(more)
        held.narrow(1, self.count, width).copy_(aux)
        self.count += width

    @property
    def tokens(self) -> Tensor:
        """Of all that waits, `(B, n)`."""
        return on_device(self._tokens, self.aux.device)

    @property
    def aux(self) -> Tensor:
        """Hidden states of all that waits, `(B, n, A*Ht)`; valid until the next `add`."""
        assert self._buffer is not None, "nothing waits"
        return self._buffer.narrow(1, 0, self.count)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.count = 0
