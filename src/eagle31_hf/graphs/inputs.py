"""What graphs read: tensors of fixed shape in the same memory every round, and the slots of the running step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache.graph_sizes import slot_bucket
from ..cache.row_pool import RowPool
from ..cache.speculative import SpeculativeCache
from ..drafting.host_numbers import on_device
from .fixed_cache import FixedShapeCache

MOST_POOLED_ROWS = 8
"""Each number of rows of a pool has graphs of its own, up to this many: those of a machine at home."""


class GraphInputs:
    """Buffers and slots of the steps over one cache.

    Attributes:
        cache: the one rounds are committed to.
        fixed: what stands for it in graphs.
        num_slots: of full layers that the step about to run looks at, as of `make_room`.
    """

    def __init__(self, cache: SpeculativeCache):
        self.cache, self.fixed = cache, FixedShapeCache(cache)
        self.num_slots = 0
        self._first_rows, self._is_pool = cache.batch_size, isinstance(cache, RowPool)
        self._buffers: dict[Hashable, Tensor] = {}

    def fill(self, name: str, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`source`, in the leading corner of a buffer of this name and shape where it is smaller; the rest holds
        whatever was there, and nothing reads it."""
        if tuple(source.shape) == shape:
            return source
        buffer = self._buffers.get((name, shape, source.dtype))
        if buffer is None:
            buffer = self._buffers[name, shape, source.dtype] = source.new_zeros(shape)
        corner = buffer
        for dim, size in enumerate(source.shape):
            if dim and size != shape[dim]:  # rows may be expanded
                corner = corner.narrow(dim, 0, size)
        corner.copy_(source)
        return buffer

    def fill_mask(self, name: str, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """As `fill`, with everything beyond `source` hidden."""
        pads = (0, shape[3] - source.shape[3], 0, shape[2] - source.shape[2])
        return self.fill(name, F.pad(source, pads, value=torch.finfo(source.dtype).min), shape)

    def fill_rotary(self, tables: tuple[Tensor, Tensor], width: int) -> tuple[Tensor, Tensor]:
        """The first `width` columns of rotary tables `(B, T, d)`, padded to that many."""
        cos, sin = (table[:, :width] for table in tables)
        shape = (cos.shape[0], width, cos.shape[2])
        return self.fill("cos", cos, shape), self.fill("sin", sin, shape)

    @property
    def rows_pay(self) -> bool:
        """Whether graphs are made for as many rows as there are now: a batch that loses rows is not worth a graph for
        each number of them; a pool's numbers come back."""
        rows = self.cache.batch_size
        return rows <= MOST_POOLED_ROWS if self._is_pool else rows == self._first_rows

    def make_room(self, block_end: int) -> bool:
        """Whether the placed block, padded to `block_end`, fits; if so, the buffers have a bucket's length."""
        slots = max(self.cache.lengths) + block_end
        if block_end > self.cache.block or slots > self.cache.capacity:
            return False
        self.num_slots = self.cache.room_for_graphs(min(slot_bucket(slots), self.cache.capacity))
        return True

    @property
    def mask_widths(self) -> dict[str, int]:
        """Slots that graphs look at behind each mask, by layer type."""
        return self.cache.mask_widths(self.num_slots)

    def slots(self, num_tokens: int, *, after: int = 0) -> Tensor:
        """Slots `(B, T)` of tokens `after ... after + num_tokens - 1` of each row's block, in the present buffers."""
        self.fixed.follow(self.cache, self.num_slots)
        slots = [range(length + after, length + after + num_tokens) for length in self.cache.lengths]
        return on_device(slots, self.cache.device)
