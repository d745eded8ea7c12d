"""A cache as transformers meets it: what its code calls, and the way in from its own caches and back out into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..errors import MemoryPlanError, UnsupportedGenerationError
from .layers import SlotLayer
from .placement import Placement
from .states import StateLayer
from .stock import HeldLayer, LayerStates, StateSnapshot, held_length, read_stock_layers, refill_stock_layers


class ExchangingCache(Cache):
    """What `SpeculativeCache` answers, takes over and gives away; the rest of it is there."""

    layers: list[SlotLayer | StateLayer]  # type: ignore[assignment]
    capacity: int
    _placement: Placement
    _ring_end: list[int]  # one past the newest position ever written to a ring
    _state_end: list[int]  # the token whose states each row has

    @property
    def lengths(self) -> list[int]:
        """Committed tokens per row."""
        return list(self._placement.lengths)

    @property
    def batch_size(self) -> int:
        return self._placement.batch_size

    def rollback(self, lengths: Sequence[int]) -> None:
        raise NotImplementedError

    def select_rows(self, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def _reserve(self, num_slots: int) -> None:
        raise NotImplementedError

    # What transformers calls -----------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row, whichever layer is asked."""
        return self._placement.longest

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select_rows(torch.arange(self.batch_size)[indices.cpu()].tolist())  # indices may be a boolean mask

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_rows([row for row in range(self.batch_size) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` tokens from every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"got crop({tokens_to_remove}); wanted minus the number of tokens to remove, or 0")
        self.rollback([max(length + tokens_to_remove, 0) for length in self.lengths])

    def reset(self) -> None:
        """Empty every row; buffers stay allocated."""
        self.rollback([0] * self.batch_size)

    # In and out ------------------------------------------------------------------------------------------------------

    def load_dynamic(self, dynamic: DynamicCache, padding: Sequence[int] | None = None) -> None:
        """Take over what a plain `generate` left in its cache.

        Args:
            dynamic: that cache.
            padding: pads in front of each row, which are left there; default: none.

        Raises:
            UnsupportedGenerationError: its layers are of another kind (quantised, static, recurrent), its batch is
                another, or a layer no longer holds what is needed. This cache is then empty.
            MemoryPlanError: it is longer than `capacity`.
        """
        self.reset()
        length = held_length(dynamic)
        if length > self.capacity:
            raise MemoryPlanError(f"got a cache of {length} tokens; this one was made for capacity={self.capacity}")
        held = read_stock_layers(dynamic, self.batch_size)
        self._reserve(length)
        lengths = [length - pads for pads in padding or [0] * self.batch_size]
        for index, content in held.items():
            layer = self.layers[index]
            if content.keys is not None and content.values is not None:
                assert isinstance(layer, SlotLayer)
                layer.load(content.keys, content.values, lengths)
            if content.states:
                assert isinstance(layer, StateLayer)
                layer.load_states(content.states)
        self._ring_end, self._state_end = lengths.copy(), lengths.copy()
        self._placement.set_lengths(lengths)

    def to_dynamic(self, config: PreTrainedConfig) -> DynamicCache:
        """The committed tokens as a stock cache, for a plain `generate` to go on with. Rows must be of equal length.

        Raises:
            UnsupportedGenerationError: rows differ in length.
        """
        dynamic = DynamicCache(config=config)
        self.export_into(dynamic)
        return dynamic

    def export_into(self, dynamic: DynamicCache) -> None:
        """Refill a stock cache in place; see `to_dynamic`.

        Raises:
            UnsupportedGenerationError: rows differ in length, or the stock cache keeps whole rows where only a window
                is left (it was made without the model's config). It is then unchanged.
        """
        if not self._placement.rows_alike:
            raise UnsupportedGenerationError(
                f"rows have lengths {self.lengths}; a stock cache wants rows of equal length: export single rows"
            )
        length = self.lengths[0]
        refill_stock_layers(dynamic, self._held(length), length)

    def held_states(self) -> StateSnapshot:
        """The states of all rows, which are of equal length, as copies."""
        layers = enumerate(self.layers)
        held = {index: layer.held_states() for index, layer in layers if isinstance(layer, StateLayer)}
        return StateSnapshot(self.lengths[0], held)

    def held_row(self, row: int) -> LayerStates:
        """What layers hold of one row, oldest token first; views where they can be."""
        return self._held(self.lengths[row], row)

    def _held(self, length: int, row: int | None = None) -> LayerStates:
        held = {}
        for index, layer in enumerate(self.layers):
            keys = values = None
            if isinstance(layer, SlotLayer) and layer.is_initialized:
                keys, values = layer.held(length, row)
            held[index] = HeldLayer(keys, values, layer.held_states(row) if isinstance(layer, StateLayer) else {})
        return {index: layer for index, layer in held.items() if not layer.is_empty}
