"""Memory of keys, values and states that stays where it is from one text to the next.

Steps that are captured on a device read and write the very addresses they were recorded with, so the next text writes
where the last one did, and nothing is recorded again. One text's worth is kept; see `graphs.graphs.Graphs`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor


class KeptBuffers:
    """Keys, values and committed states of a target's and a drafter's cache, lent to one text at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._borrower: weakref.ref[Any] | None = None
        self._storages: dict[Hashable, list[Tensor]] = {}

    def lend(self, borrower: Any) -> bool:
        """Whether they are `borrower`'s from now on, until it gives them back or is gone."""
        with self._lock:
            if self._borrower is not None and self._borrower() is not None:
                return False
            self._borrower = weakref.ref(borrower)
            return True

    def give_back(self, borrower: Any) -> None:
        """They are free for the next one; whatever of them somebody still reads will be overwritten."""
        with self._lock:
            if self._borrower is not None and self._borrower() is borrower:
                self._borrower = None

    def storages(self, layer: Hashable, like: Sequence[Tensor], num_slots: int) -> list[Tensor]:
        """Zeros in which at least `num_slots` fit, one tensor `(B, heads, slots, width)` for each `like` it.

        Those of the layer's last text, unless they are too small, for other rows or elsewhere; then these go.
        """
        kept = self._storages.get(layer, [])
        if len(kept) == len(like) and all(_suits(old, new, num_slots) for old, new in zip(kept, like, strict=True)):
            # A hidden slot has weight 0, and 0 times what an overflow has left there is not 0.
            return [storage.zero_() for storage in kept]
        self._storages.pop(layer, None)
        self._storages[layer] = new_storages(like, num_slots)
        return list(self._storages[layer])

    def state(self, layer: Hashable, number: Hashable, like: Tensor) -> Tensor:
        """Zeros `(B, ...)` like it: the layer's state of its last text, if they are alike."""
        one_slot = like[:1].reshape(1, 1, 1, -1).expand(len(like), -1, -1, -1)
        return self.storages((layer, number), [one_slot], num_slots=1)[0].view(like.shape)

    def clear(self) -> None:
        """Let all go; a text that was lent them goes on with them, and they go with it."""
        self._storages.clear()


def new_storages(like: Sequence[Tensor], num_slots: int) -> list[Tensor]:
    """Zeros `(B, heads, num_slots, width)`, one tensor for each `like` it in all but the number of slots."""
    return [each.new_zeros(*each.shape[:2], num_slots, each.shape[3]) for each in like]


def _suits(kept: Tensor, like: Tensor, num_slots: int) -> bool:
    alike = (kept.shape[:2], kept.shape[3]) == (like.shape[:2], like.shape[3])
    return alike and kept.shape[2] >= num_slots and (kept.dtype, kept.device) == (like.dtype, like.device)
