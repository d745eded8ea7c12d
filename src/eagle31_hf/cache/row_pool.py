"""A speculative cache whose rows come and go, one at a time, without the others being moved or copied.

All rows are allocated once. The first `batch_size` are live: forwards see them and no others. A row that leaves changes
places with the last live one and stays where it then lies, parked, until a row that joins needs the place. What is
parked can be read (`copy_row`): a text that begins as a parked one need not be computed again.

    places    0 .. batch_size-1     batch_size .. reserved_rows-1
              live                  parked, or never used
"""

from __future__ import annotations

from typing import Any

from ..errors import MemoryPlanError
from .speculative import SpeculativeCache


class RowPool(SpeculativeCache):
    """See above; made as any `SpeculativeCache`, with `batch_size` rows of which none is live yet."""

    def __init__(self, *args: Any, batch_size: int, **kwargs: Any):
        super().__init__(*args, batch_size=batch_size, **kwargs)
        self._parked: dict[int, int] = {}  # lengths, by place
        self.placement.set_rows([])

    def row_length(self, place: int) -> int:
        """Tokens of a live or parked row; 0 where nothing lies."""
        return self.placement.lengths[place] if place < self.batch_size else self._parked.get(place, 0)

    def can_resume(self, place: int, length: int) -> bool:
        """Whether a row's first `length` tokens are all held: always in full layers, in rings only until they turn, and
        of states those after the last token."""
        full = self.row_length(place)
        if length == full:
            return full > 0
        return 0 < length < full <= min(self.kinds.rings, default=full) and not self.has_states

    def join(self, source: SpeculativeCache) -> int:
        """Copy the only row of `source` behind the live ones, where it becomes one of them. Returns its place.

        Raises:
            MemoryPlanError: all rows are live.
        """
        place = self.batch_size
        if place == self.placement.reserved_rows:
            raise MemoryPlanError(f"all {place} rows are taken; one has to leave before another joins")
        (length,) = source.lengths
        self._parked.pop(place, None)  # first: a copy that fails may have written over a part of what is parked there
        if self.placement.reserved_rows == 1:
            self._shrink()
        copy_row(source, 0, self, place, length)
        self.placement.set_rows([*self.lengths, length])
        return place

    def _shrink(self) -> None:
        """Let the last text's memory go: graphs are kept for rows that are as long as their texts need."""
        self.placement.reserved_slots = 0
        for layer in self.layers:
            layer.is_initialized = False

    def leave(self, place: int) -> int:
        """Park a live row behind the others; the last live one takes its place. Returns where the parked row lies."""
        last, lengths = self.batch_size - 1, self.lengths
        if place != last:
            for rows in self.row_tensors(max(lengths[place], lengths[last])):  # slots that neither fills stay
                kept = rows[place].clone()
                rows[place].copy_(rows[last])
                rows[last].copy_(kept)
        self._parked[last], lengths[place] = lengths[place], lengths[last]
        self.placement.set_rows(lengths[:-1])
        return last

    def empty(self) -> None:
        """No row is live or parked, and nothing of what was ever written is left."""
        for place in range(self.placement.reserved_rows):
            wipe_row(self, place)
        self._parked.clear()
        self.placement.set_rows([])


def resume_row(cache: SpeculativeCache, pool: RowPool, place: int, length: int) -> None:
    """Begin `cache`, of one row, with the first `length` tokens of a pool's row, live or parked."""
    assert pool.can_resume(place, length), "that is asked before"
    cache.reset()
    copy_row(pool, place, cache, 0, length)
    cache.placement.set_lengths([length])


def copy_row(source: SpeculativeCache, row: int, target: SpeculativeCache, place: int, length: int) -> None:
    """Copy a row's first `length` tokens, and the states after them, from one cache to another of the same kind."""
    target._reserve(max(length, 1))
    for own, other in zip(target.layers, source.layers, strict=True):
        own.adopt_layout(other)
    for states, others in zip(target.with_states, source.with_states, strict=True):
        states.adopt_states(others)
    for rows, tensor in zip(target.row_tensors(length), source.row_tensors(length), strict=True):
        rows[place].copy_(tensor[row])


def wipe_row(cache: SpeculativeCache, place: int) -> None:
    """Leave nothing of what was ever written to a row; how long it is does not change."""
    for layer in cache.layers:
        for storage in layer.storages:
            storage[place].zero_()
    for states in cache.with_states:
        for rows in states.state_buffers:
            rows[place].zero_()
        states.release_block()
