"""Storage of one attention layer's keys and values: preallocated, written in place.

A layer knows three moves: `update` (a forward writes a block and reads what it may attend to), `copy` (accepted nodes
move to their final slots) and `select_rows`. Every move goes over all `buffers` alike. A storage that keeps its
contents in another form (`quantized`) names its buffers and brings its own `pack`, `unpack` and `read`; nothing else in
the cache touches a buffer.

Two layouts:

    FullLayer      slot = position                    | committed ... | block |
    WindowLayer    slot = position % R, then a scratch | ring of R slots | block |     R = window - 1

Keys are stored after their rotation, so the order of slots means nothing to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedGenerationError
from .kept_buffers import new_storages
from .placement import Placement
from .slot_moves import SlotMoves, ring_slots_of_last


class SlotLayer(CacheLayerMixin):
    """Keys `(B, heads, slots, Dk)` and values `(B, heads, slots, Dv)` of one layer; `Dk` and `Dv` may differ (MLA).

    Buffers appear with the first `update`, on the device and in the dtype of its tensors. A layer that shares another
    layer's keys and values is never updated and stays empty.
    """

    is_compileable = False
    is_sliding = False  # the masks are ours for every layer, so transformers must not size one by a window
    is_croppable = True
    buffer_names: tuple[str, ...] = ("keys", "values")
    allocate: Callable[[Sequence[Tensor], int], list[Tensor]]  # as `new_storages`, of at least so many slots
    keys: Tensor
    values: Tensor

    def __init__(self, placement: Placement):
        super().__init__()
        self.placement, self.allocate = placement, new_storages

    # What is stored ------------------------------------------------------------------------------------------------

    @property
    def storages(self) -> tuple[Tensor, ...]:
        """What the layer owns, each `(reserved rows, heads, slots, width)`."""
        return tuple([getattr(self, name) for name in self.buffer_names])

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the layer stores of its rows, each `(B, heads, slots, width)`."""
        if self.placement.reserved_rows is None:
            return self.storages
        rows = self.placement.batch_size
        return tuple([storage[:rows] for storage in self.storages])

    def _replace_buffers(self, buffers: Iterable[Tensor]) -> None:
        # All of them are made before the first is replaced: a failure on the way loses nothing.
        for name, buffer in zip(self.buffer_names, tuple(buffers), strict=True):
            setattr(self, name, buffer)

    def pack(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, ...]:
        """Keys `(B, heads, T, Dk)` and values `(B, heads, T, Dv)` as they are stored, one tensor per buffer."""
        return key_states, value_states

    def unpack(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values from (slices of) the buffers."""
        keys, values = parts
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._replace_buffers(self._zeros_like(self.pack(key_states[:, :, :1], value_states[:, :, :1])))
        self.is_initialized = True

    def adopt_layout(self, other: SlotLayer) -> None:
        """Own empty buffers such as another layer of the same kind has."""
        self.dtype, self.device = other.dtype, other.device
        self._replace_buffers(self._zeros_like([storage[:1] for storage in other.storages]))
        self.is_initialized = True

    def _zeros_like(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What parts like these `(B, heads, n, width)` are stored in.

        Zeros, not empty: a hidden slot has weight 0, and 0 * NaN would still be NaN.
        """
        rows = self.placement.reserved_rows
        like = [part if rows is None else part[:1].expand(rows, -1, -1, -1) for part in parts]
        return self.allocate(like, self.num_slots)

    @property
    def num_slots(self) -> int:
        """Slots the buffers must have for what is placed now."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the placed block `(B, heads, T, D)`; return the slots its queries may attend to, as `read` does."""
        self.placement.check(len(key_states), key_states.shape[2])
        self.make_room()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.write(self.pack(key_states, value_states))
        return self.read()

    def write(self, parts: Sequence[Tensor]) -> None:
        """Put the placed block, packed, into its slots."""
        raise NotImplementedError

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `(B, heads, visible, D)` of the slots the placed queries may attend to, as views."""
        visible = self.visible_slots
        return self.unpack([buffer.narrow(2, 0, visible) for buffer in self.buffers])

    @property
    def visible_slots(self) -> int:
        """Slots that take part in the placed forward, from the first on."""
        raise NotImplementedError

    def copy(self, moves: SlotMoves) -> None:
        source, target, *rows = moves.on(self.device)
        for buffer in self.buffers:  # the sources are read in full before a target is written
            if rows:
                buffer[rows[0], :, target] = buffer[rows[0], :, source]
            elif moves.start is not None:
                buffer.narrow(2, moves.start, len(source)).copy_(buffer.index_select(2, source))
            else:
                buffer.index_copy_(2, target, buffer.index_select(2, source))

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.is_initialized:
            index = torch.tensor(rows, device=self.device)
            self.allocate = new_storages
            self._replace_buffers(buffer.index_select(0, index) for buffer in self.buffers)

    def load(self, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> None:
        """Take over rows of so many tokens of which `keys`, `values` hold the newest, oldest first."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if min(lengths) == max(lengths):
            return self._load_rows(slice(None), keys, values, lengths[0])
        for row, length in enumerate(lengths):
            self._load_rows(slice(row, row + 1), keys, values, length)

    def _load_rows(self, rows: slice, keys: Tensor, values: Tensor, length: int) -> None:
        slots = torch.tensor(self.slots_of(length), dtype=torch.long, device=self.device)
        if keys.shape[2] < len(slots):
            raise UnsupportedGenerationError(
                f"a cache layer of {length} tokens holds {keys.shape[2]} of them and {len(slots)} are needed to go on; "
                "start with an empty cache"
            )
        first = keys.shape[2] - len(slots)
        parts = self.pack(*(states[rows, :, first:].to(self.dtype) for states in (keys, values)))
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[rows].index_copy_(2, slots, part.to(self.device))

    def held(self, length: int, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values `(B or 1, heads, k, D)` of the newest tokens of rows of `length`, or of one `row`, oldest
        first; views where they can be."""
        rows = slice(None) if row is None else slice(row, row + 1)
        return self.unpack([self._newest(buffer[rows], length) for buffer in self.buffers])

    def _newest(self, buffer: Tensor, length: int) -> Tensor:
        return buffer.index_select(2, torch.tensor(self.slots_of(length), dtype=torch.long, device=self.device))

    def slots_of(self, length: int) -> list[int]:
        """Slots of the tokens still held of rows of `length`, oldest first."""
        raise NotImplementedError

    def make_room(self) -> None:
        """Grow to the slots that are reserved; an empty layer stays so."""
        if self.is_initialized and self.keys.shape[2] < self.num_slots:
            self._grow()

    def _grow(self) -> None:
        """Move to larger buffers."""
        owned = self.keys.shape[2]
        keep = owned if self.placement.reserved_rows else self.placement.longest + self.placement.after
        grown = self._zeros_like(self.storages)
        for new, old in zip(grown, self.storages, strict=True):
            new[:, :, :keep].copy_(old[:, :, :keep])
        self._replace_buffers(grown)

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages) if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible_slots, 0

    def get_seq_length(self) -> int:
        return self.placement.longest

    def get_max_length(self) -> int:
        return -1  # the cache, not the layer, refuses what does not fit


class FullLayer(SlotLayer):
    """Every position visible: token `p` of a row lies in slot `p`."""

    @property
    def num_slots(self) -> int:
        return self.placement.reserved_slots

    def slots_of(self, length: int) -> list[int]:
        return list(range(length))

    @property
    def visible_slots(self) -> int:
        return self.placement.visible_slots

    def _newest(self, buffer: Tensor, length: int) -> Tensor:
        return buffer[:, :, :length]

    def write(self, parts: Sequence[Tensor]) -> None:
        placement = self.placement
        if placement.start is not None:
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer.narrow(2, placement.start, placement.num_tokens).copy_(part)
            return
        rows, slots = placement.slots.on(self.device)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[rows, :, slots] = part.transpose(1, 2)  # (B, T, heads, D)


class WindowLayer(SlotLayer):
    """Only the last `window` positions visible, the query's own included: `window - 1` ring slots and a scratch.

    The block is written to the scratch and reaches the ring only when committed, so a rejected node never costs
    a committed one. Every row writes the same slots: no row index is needed even when lengths differ.
    """

    def __init__(self, placement: Placement, ring: int):
        super().__init__(placement)
        self.ring = ring

    @property
    def num_slots(self) -> int:
        return self.ring + self.placement.block

    def slots_of(self, length: int) -> list[int]:
        return ring_slots_of_last(length, self.ring)

    @property
    def visible_slots(self) -> int:
        return self.ring + self.placement.block_end

    def write(self, parts: Sequence[Tensor]) -> None:
        placement = self.placement
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.narrow(2, self.ring + placement.after, placement.num_tokens).copy_(part)
