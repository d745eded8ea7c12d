"""A speculative cache whose rows come and go, one at a time, without the others being moved or copied.

All rows are allocated once. The first `batch_size` are live: forwards see them and no others. A row that leaves changes
places with the last live one and stays where it then lies, parked, until a row that joins needs the place. What is
parked can be read (`copy_row_from`): a text that begins as a parked one need not be computed again.

    places    0 .. batch_size-1     batch_size .. num_rows-1
              live                  parked, or never used
"""

from __future__ import annotations

from typing import Any

from ..errors import MemoryPlanError, UnsupportedGenerationError
from .layers import SlotLayer, WindowLayer
from .speculative import SpeculativeCache


class RowPool(SpeculativeCache):
    """See above; made as any `SpeculativeCache`, with `batch_size` rows of which none is live yet."""

    def __init__(self, *args: Any, batch_size: int, **kwargs: Any):
        super().__init__(*args, batch_size=batch_size, **kwargs)
        self.num_rows = batch_size
        self.placement.reserved_rows = batch_size
        self._parked: dict[int, tuple[int, int]] = {}  # by place: length, and end of the rings
        self._set_live([], [])

    def room_for_graphs(self, num_slots: int) -> int:
        """As of any cache; a pool's rows are as long as any text may get, and graphs look at what present ones need."""
        self.make_room(num_slots)
        return num_slots

    def row_length(self, place: int) -> int:
        """Tokens of a live or parked row; 0 where nothing lies."""
        return self._length_and_ring_end(place)[0]

    def _length_and_ring_end(self, place: int) -> tuple[int, int]:
        if place < self.batch_size:
            return self.lengths[place], self._ring_end[place]
        return self._parked.get(place, (0, 0))

    def can_resume(self, place: int, length: int) -> bool:
        """Whether a row's first `length` tokens are all held: always in full layers, in rings only until they turn, and
        of states those after the last token."""
        full, end = self._length_and_ring_end(place)
        if self.has_states and length != full:
            return False
        ring = min(self._spans.rings, default=0)
        return 0 < length <= full and (not ring or end <= ring or (length == full == end))

    def join(self, source: SpeculativeCache) -> int:
        """Copy the only row of `source` behind the live ones, where it becomes one of them. Returns its place.

        Raises:
            MemoryPlanError: all rows are live.
        """
        place = self.batch_size
        if place == self.num_rows:
            raise MemoryPlanError(f"all {self.num_rows} rows are taken; one has to leave before another joins")
        (length,) = source.lengths
        self._parked.pop(place, None)  # first: a copy that fails may have written over a part of what is parked there
        if self.num_rows == 1:
            self._shrink()
        self._copy(source, 0, place, length)
        self._set_live([*self.lengths, length], [*self._ring_end, source._ring_end[0]])
        return place

    def _shrink(self) -> None:
        """Let the last text's memory go: graphs are kept for rows that are as long as their texts need."""
        self.placement.reserved_slots = 0
        for layer in self.attending:
            layer.is_initialized = False

    def leave(self, place: int) -> int:
        """Park a live row behind the others; the last live one takes its place. Returns where the parked row lies."""
        last = self.batch_size - 1
        if not 0 <= place <= last:
            raise UnsupportedGenerationError(f"got place {place} to leave; wanted one of the {last + 1} live rows")
        if place != last:
            for layer in self.attending:
                if layer.is_initialized:
                    exchange_rows(layer, place, last, max(self.lengths[place], self.lengths[last]))
            for states in self.with_states:
                states.exchange_states(place, last)
        lengths, ends = self.lengths, list(self._ring_end)
        self._parked[last] = lengths[place], ends[place]
        lengths[place], ends[place] = lengths[last], ends[last]
        self._set_live(lengths[:-1], ends[:-1])
        return last

    def empty(self) -> None:
        """No row is live or parked, and nothing of what was ever written is left."""
        for place in range(self.num_rows):
            wipe_row(self, place)
        self._parked.clear()
        self._set_live([], [])

    def _set_live(self, lengths: list[int], ring_ends: list[int]) -> None:
        self._ring_end, self._state_end = ring_ends, lengths.copy()
        self.placement.set_batch(len(lengths))
        self.placement.set_lengths(lengths)

    def _copy(self, source: SpeculativeCache, row: int, place: int, length: int) -> None:
        """Take a row's first `length` tokens over, ring and all."""
        self._reserve(max(length, 1))
        copy_layers(source, row, self, place, length)

    def select_rows(self, rows: Any) -> None:
        """Not of a pool: rows join and leave one at a time."""
        raise UnsupportedGenerationError("rows of a pool join and leave one at a time; use join and leave")


def resume_row(cache: SpeculativeCache, pool: RowPool, place: int, length: int) -> None:
    """Begin `cache`, of one row, with the first `length` tokens of a pool's row, live or parked.

    Raises:
        UnsupportedGenerationError: the pool does not hold them any more.
    """
    if not pool.can_resume(place, length):
        raise UnsupportedGenerationError(f"row {place} of the pool does not hold its first {length} tokens any more")
    cache.reset()
    cache._reserve(length)
    copy_layers(pool, place, cache, 0, length)
    cache._ring_end, cache._state_end = [length], [length]
    cache.placement.set_lengths([length])


def copy_layers(source: SpeculativeCache, row: int, target: SpeculativeCache, place: int, length: int) -> None:
    """Copy a row's first `length` tokens, and the states after them, from one cache to another of the same kind."""
    for own, other in zip(target.attending, source.attending, strict=True):
        copy_row(other, row, own, place, length)
    for states, others in zip(target.with_states, source.with_states, strict=True):
        states.copy_states(place, others, row)


def copy_row(source: SlotLayer, row: int, target: SlotLayer, place: int, length: int) -> None:
    """Copy a row's first `length` tokens from one layer's storages to another's of the same kind."""
    if not source.is_initialized:
        return
    if not target.is_initialized:
        target.adopt_layout(source)
    target.make_room()
    slots = _slots_held(source, length)
    for own, other in zip(target.storages, source.storages, strict=True):
        own[place, :, :slots].copy_(other[row, :, :slots])


def exchange_rows(layer: SlotLayer, one: int, other: int, length: int) -> None:
    """Let two rows of at most `length` tokens change places; slots that neither fills stay as they are."""
    slots = _slots_held(layer, length)
    for storage in layer.storages:
        first, second = storage[one, :, :slots], storage[other, :, :slots]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def wipe_row(cache: SpeculativeCache, place: int) -> None:
    """Leave nothing of what was ever written to a row; how long it is does not change."""
    for layer in cache.attending:
        for storage in layer.storages if layer.is_initialized else ():
            storage[place].zero_()
    for states in cache.with_states:
        states.wipe_states(place)


def _slots_held(layer: SlotLayer, length: int) -> int:
    """First slots in which rows of at most `length` tokens lie."""
    return layer.ring if isinstance(layer, WindowLayer) else length
