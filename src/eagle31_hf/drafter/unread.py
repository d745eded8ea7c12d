"""What a drafter that rests will read when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class UnreadPositions:
    """Tokens and hidden states of positions that wait to be read, the states in one buffer.

    Kept one by one, they would lie between what each forward of the target allocates: that alone made the matrix
    products of a small one 5 % slower.

    Args:
        room: most positions that may wait.
    """

    def __init__(self, room: int):
        self.room, self.count = room, 0
        self._tokens: list[list[int]] = []  # of each row
        self._aux: Tensor | None = None  # (B, room, A*Ht)
        self._chances: list[tuple[int, Tensor | None]] = []  # so many positions, (B, T) where they are known

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
        assert self._aux is not None
        for row, more in zip(self._tokens, tokens, strict=True):
            row.extend(more)
        width = aux.shape[1]
        self._aux.narrow(1, self.count, width).copy_(aux)
        self._chances.append((width, chances))
        self.count += width

    def _make_room(self, aux: Tensor) -> None:
        """Buffers for such rows: those of before, if they were like these."""
        rows, _, width = aux.shape
        held = self._aux
        self._tokens = [[] for _ in range(rows)]
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, width)):
            self._aux = aux.new_empty(rows, self.room, width)

    @property
    def tokens(self) -> Tensor:
        """Of all that waits, `(B, n)`."""
        return torch.tensor(self._tokens, device=self._device)

    @property
    def _device(self) -> torch.device | None:
        return None if self._aux is None else self._aux.device

    @property
    def aux(self) -> Tensor:
        """Hidden states of all that waits, `(B, n, A*Ht)`; valid until the next `add`."""
        assert self._aux is not None, "nothing waits"
        return self._aux.narrow(1, 0, self.count)

    @property
    def chances(self) -> Tensor:
        """The target's probability of each token that waits, `(B, n)`."""
        known = (torch.ones(len(self._tokens), width) if each is None else each for width, each in self._chances)
        return torch.cat([each.to(self._device) for each in known], dim=1)

    def clear(self) -> None:
        """Nothing waits any more."""
        self.count = 0
        self._chances.clear()
