"""What a drafter that rests will read when its turn comes."""

from __future__ import annotations

from torch import Tensor


class UnreadPositions:
    """Tokens and hidden states of positions that wait to be read, in one buffer.

    Kept one by one, they would lie between what each forward of the target allocates: that alone made the matrix
    products of a small one 5 % slower.

    Args:
        room: most positions that may wait.
    """

    def __init__(self, room: int):
        self.room, self.count = room, 0
        self._tokens: Tensor | None = None  # (B, room)
        self._aux: Tensor | None = None  # (B, room, A*Ht)

    def fits(self, width: int) -> bool:
        """Whether there is room for so many more."""
        return self.count + width <= self.room

    def add(self, tokens: Tensor, aux: Tensor) -> None:
        """Keep copies of `tokens` `(B, T)` and `aux` `(B, T, A*Ht)`, behind those that wait."""
        if not self.count:
            self._make_room(tokens, aux)
        assert self._tokens is not None
        assert self._aux is not None
        width = tokens.shape[1]
        self._tokens.narrow(1, self.count, width).copy_(tokens)
        self._aux.narrow(1, self.count, width).copy_(aux)
        self.count += width

    def _make_room(self, tokens: Tensor, aux: Tensor) -> None:
        """Buffers for such rows: those of before, if they were like these."""
        rows, _, width = aux.shape
        held = self._aux
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, width)):
            self._tokens, self._aux = tokens.new_empty(rows, self.room), aux.new_empty(rows, self.room, width)

    @property
    def waiting(self) -> tuple[Tensor, Tensor]:
        """Tokens `(B, n)` and hidden states `(B, n, A*Ht)` of all that waits; valid until the next `add`."""
        assert self._tokens is not None, "nothing waits"
        assert self._aux is not None
        return self._tokens.narrow(1, 0, self.count), self._aux.narrow(1, 0, self.count)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.count = 0
