"""A speculative cache as compiled code wants it: shapes and Python values that stay as they are from round to round.

The buffers are those of a `SpeculativeCache`, whole: every query sees all of their slots, and the mask hides what is
not its own. Where a block is written is a tensor, not a number, so that a graph made in one round serves the next.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import UnsupportedGenerationError
from .layers import SlotLayer, WindowLayer
from .speculative import SpeculativeCache


class BlockSlots:
    """Slots `(B, T)` of full layers that the running forward writes."""

    slots: Tensor


class FixedLayer(CacheLayerMixin):
    """The buffers of one `SlotLayer`; `ring` is where the block begins in a windowed one, `None` in a full one."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, block: BlockSlots, ring: int | None):
        super().__init__()
        self.block, self.ring = block, ring

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the block `(B, heads, T, D)`; return all slots `(B, heads, slots, D)`."""
        if self.ring is None:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]  # (B, 1)
            self.keys[rows, :, self.block.slots] = key_states.transpose(1, 2)  # (B, T, heads, D)
            self.values[rows, :, self.block.slots] = value_states.transpose(1, 2)
        else:
            self.keys.narrow(2, self.ring, key_states.shape[2]).copy_(key_states)
            self.values.narrow(2, self.ring, value_states.shape[2]).copy_(value_states)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise UnsupportedGenerationError("a compiled forward cannot allocate; run an eager one first")

    def get_mask_sizes(self, query_length: int) -> NoReturn:
        self._refuse()

    def get_seq_length(self) -> NoReturn:
        self._refuse()

    def get_max_length(self) -> int:
        return -1

    def _refuse(self) -> NoReturn:
        # The answer would be frozen into the graph: right this round, wrong in the next.
        raise UnsupportedGenerationError("the target asks its cache how long it is, which compiled code cannot follow")


class FixedShapeCache(Cache):
    """Stands in for `source` during compiled forwards; holds its buffers, never copies them."""

    layers: list[FixedLayer]  # type: ignore[assignment]

    def __init__(self, source: SpeculativeCache):
        self.block = BlockSlots()
        layers = [FixedLayer(self.block, _ring(layer)) for layer in source.layers]
        super().__init__(layers=layers)  # type: ignore[arg-type]

    def follow(self, source: SpeculativeCache, slots: Tensor) -> None:
        """Take the buffers `source` has now (growing and dropping rows replace them) and write to `slots` `(B, T)`."""
        self.block.slots = slots
        for fixed, layer in zip(self.layers, source.layers, strict=True):
            if layer.is_initialized:  # a layer that shares another's keys and values has none
                fixed.keys, fixed.values = layer.keys, layer.values
                fixed.is_initialized = True


def _ring(layer: SlotLayer) -> int | None:
    return layer.ring if isinstance(layer, WindowLayer) else None
