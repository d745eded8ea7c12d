"""Storage of one attention layer's keys and values: preallocated, written in place.

A layer knows two moves: `update` (a forward writes a block and reads what it may attend to) and `copy` (accepted nodes
move to their final slots). Both go over all `buffers` alike; how numbers are stored in them
(`pack`, `unpack`) is asked where they come and where they are read.

Two layouts:

    all positions visible  slot = position                     | committed ... | block |
    a window of them       slot = position % R, then a scratch | ring of R slots | block |     R = window - 1

A windowed layer's block is written to the scratch and reaches the ring only when committed, so a rejected node never
costs a committed one. Every row writes the same slots there: no row index is needed even when lengths differ. Keys are
stored after their rotation, so the order of slots means nothing to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedGenerationError
from .kept_buffers import new_storages
from .placement import Placement
from .quantized import decode, encode
from .slot_moves import SlotMoves


class SlotLayer(CacheLayerMixin):
    """Keys `(B, heads, slots, Dk)` and values `(B, heads, slots, Dv)` of one layer; `Dk` and `Dv` may differ (MLA).

    Storages appear with the first `update`, on the device and in the dtype of its tensors. A layer that shares another
    layer's keys and values is never updated and stays empty.

    Args:
        placement: of the cache's rows.
        ring: committed tokens that a windowed layer holds; `None`: all of them.
        in_eight_bits: how numbers are stored; default: as they come.

    Attributes:
        storages: what the layer owns, each `(reserved rows, heads, slots, width)`: keys, values and, of 8 bits, the
            scales of both.
    """

    is_compileable = False
    is_sliding = False  # the masks are ours for every layer, so transformers must not size one by a window
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, placement: Placement, ring: int | None = None, *, in_eight_bits: bool = False):
        super().__init__()
        self.placement, self.ring, self.in_eight_bits = placement, ring, in_eight_bits
        self.storages: tuple[Tensor, ...] = ()
        # As `new_storages`, of at least so many slots.
        self.allocate: Callable[[Sequence[Tensor], int], list[Tensor]] = new_storages

    # What is stored ------------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the layer stores of its rows, each `(B, heads, slots, width)`."""
        rows = self.placement.batch_size
        return self.storages if rows == len(self.keys) else tuple([storage[:rows] for storage in self.storages])

    def _replace_storages(self, storages: Iterable[Tensor]) -> None:
        # All of them are made before the first is replaced: a failure on the way loses nothing.
        self.storages = tuple(storages)
        self.keys, self.values = self.storages[:2]

    def pack(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, ...]:
        """Keys `(B, heads, T, Dk)` and values `(B, heads, T, Dv)` as they are stored, one tensor per buffer."""
        if not self.in_eight_bits:
            return key_states, value_states
        (keys, key_scales), (values, value_scales) = encode(key_states), encode(value_states)
        return keys, values, key_scales, value_scales

    def unpack(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values from slices of the buffers."""
        keys, values, *scales = parts
        if not self.in_eight_bits:
            return keys, values
        return decode(keys, scales[0]), decode(values, scales[1])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._replace_storages(self._zeros_like(self.pack(key_states[:, :, :1], value_states[:, :, :1])))
        self.is_initialized = True

    def adopt_layout(self, other: SlotLayer) -> None:
        """Have empty storages such as another layer of the same kind has, and room for what is placed."""
        if other.is_initialized and not self.is_initialized:
            keys, values = (states[:1, :, :1].to(other.dtype) for states in (other.keys, other.values))
            self.lazy_initialization(keys, values)
        self.make_room()

    def _zeros_like(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What parts like these `(B, heads, n, width)` are stored in.

        Zeros, not empty: a hidden slot has weight 0, and 0 * NaN would still be NaN.
        """
        rows = self.placement.reserved_rows
        return self.allocate([part[:1].expand(rows, -1, -1, -1) for part in parts], self.num_slots)

    @property
    def num_slots(self) -> int:
        """Slots the buffers must have for what is placed now."""
        return self.placement.reserved_slots if self.ring is None else self.ring + self.placement.block

    def make_room(self) -> None:
        """Grow to the slots that are reserved; an empty layer stays so."""
        if self.is_initialized and self.keys.shape[2] < self.num_slots:
            self._grow()

    def _grow(self) -> None:
        """Move to larger buffers."""
        grown = self._zeros_like(self.storages)
        for new, old in zip(grown, self.storages, strict=True):
            new[:, :, : old.shape[2]].copy_(old[: len(new)])  # rows that have left are not kept
        self._replace_storages(grown)

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages) if self.is_initialized else 0

    # A forward -----------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the placed block `(B, heads, T, D)`; return the slots its queries may attend to, as `read` does."""
        placement = self.placement
        placement.check(key_states.shape[0], key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.num_slots:
            self._grow()
        start = placement.start if self.ring is None else self.ring + placement.after
        for buffer, part in zip(self.buffers, self.pack(key_states, value_states), strict=True):
            if start is None:
                rows, slots = placement.slots.on(self.device)
                buffer[rows, :, slots] = part.transpose(1, 2)  # (B, T, heads, D)
            else:
                buffer[:, :, start : start + placement.num_tokens] = part
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `(B, heads, visible, D)` of the slots the placed queries may attend to, views where
        they can be."""
        visible = self.visible_slots
        return self.unpack([buffer.narrow(2, 0, visible) for buffer in self.buffers])

    @property
    def visible_slots(self) -> int:
        """Slots that take part in the placed forward, from the first on."""
        return self.placement.visible_slots if self.ring is None else self.ring + self.placement.block_slots

    def copy(self, moves: SlotMoves) -> None:
        source, target, *rows = moves.on(self.device)
        for buffer in self.buffers:  # the sources are read in full before a target is written
            if rows:
                buffer[rows[0], :, target] = buffer[rows[0], :, source]
            elif moves.start is not None:
                buffer.narrow(2, moves.start, len(source)).copy_(buffer.index_select(2, source))
            else:
                buffer.index_copy_(2, target, buffer.index_select(2, source))

    # Rows ----------------------------------------------------------------------------------------------------------

    def row_tensors(self, length: int) -> list[Tensor]:
        """Where rows of at most `length` tokens lie, `(reserved rows, ...)` each."""
        return [storage[:, :, : length if self.ring is None else self.ring] for storage in self.storages]

    def load(self, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> None:
        """Take over rows of so many tokens of which `keys`, `values` hold the newest, oldest first."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for row, length in enumerate(lengths):
            slots = self._slots_of(length)
            if keys.shape[2] < len(slots):
                raise UnsupportedGenerationError(
                    f"a cache layer of {length} tokens holds {keys.shape[2]} of them and {len(slots)} are needed to go "
                    "on; start with an empty cache"
                )
            newest = [
                states[row : row + 1, :, keys.shape[2] - len(slots) :].to(self.dtype) for states in (keys, values)
            ]
            for buffer, part in zip(self.buffers, self.pack(*newest), strict=True):
                buffer[row : row + 1].index_copy_(2, slots, part.to(self.device))

    def held(self, length: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `(1, heads, k, D)` of the newest tokens of a row of `length`, oldest first; views where they
        can be."""
        buffers = [buffer[row : row + 1] for buffer in self.buffers]
        if self.ring is None:
            newest = [buffer[:, :, :length] for buffer in buffers]
        else:
            newest = [buffer.index_select(2, self._slots_of(length)) for buffer in buffers]
        return self.unpack(newest)

    def _slots_of(self, length: int) -> Tensor:
        """Slots of the tokens still held of rows of `length`, oldest first."""
        ring = self.ring or max(length, 1)
        slots = [position % ring for position in range(max(0, length - ring), length)]
        return torch.tensor(slots, dtype=torch.long, device=self.device)

    # Asked by transformers -----------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible_slots, 0

    def get_seq_length(self) -> int:
        return self.placement.longest

    def get_max_length(self) -> int:
        return -1  # the cache, not the layer, refuses what does not fit
