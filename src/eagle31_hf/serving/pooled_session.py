"""The drafter's side of a batch whose rows come and go."""

from __future__ import annotations

import torch

from ..cache.row_pool import RowPool
from ..drafter.drafter import Eagle31Drafter
from ..drafter.reach import layer_windows
from ..drafter.session import SLAB, DraftSession, DraftState


class PooledDraftSession(DraftSession):
    """The drafter's side of a batch whose rows come and go."""

    def __init__(self, drafter: Eagle31Drafter, *, batch_size: int, capacity: int, block: int):
        super().__init__(drafter, batch_size=batch_size, capacity=capacity, block=block)
        self.cache: RowPool = RowPool(
            layer_windows(drafter),
            batch_size=batch_size,
            capacity=capacity,
            block=block,
            slab=SLAB if capacity > SLAB else None,
            device=drafter.device,
        )

    def join(self, other: DraftSession) -> None:
        """Take the only row of another session behind the others."""
        self.catch_up()
        self.cache.join(other.cache)
        self._rotary = None
        own, new = self._root, other.root
        self._root = new if own is None else DraftState(
            torch.cat((own.logits, new.logits)), torch.cat((own.feedback, new.feedback))
        )  # fmt: skip

    def leave(self, place: int) -> None:
        """Let a row go; the last one takes its place."""
        self.catch_up()
        rows = list(range(self.cache.batch_size))
        self.cache.leave(place)
        self._rotary = None
        rows[place] = rows[-1]
        index = torch.tensor(rows[:-1], dtype=torch.long, device=self.root.logits.device)
        self._root = DraftState(self.root.logits[index], self.root.feedback[index]) if len(rows) > 1 else None
