"""A transformers `Cache` for speculation: preallocated, written in place, with rows of their own length.

One round, for target and drafter alike:

    cache.place(T)                                   # the next T tokens of row b go to slots lengths[b] + i
    model(tokens, past_key_values=cache, attention_mask=cache.attention_mask(ancestors, depths, dtype),
          position_ids=cache.position_ids(depths))
    cache.keep(paths)                                # accepted nodes become the row's next tokens

`lengths` moves only in `keep`, `commit` and `reset`. What a forward writes lies beyond it until then, so a forward
that fails half-way leaves nothing to undo. Rejected and padded slots are never cleared: masks hide them until they
are overwritten. Layers that keep recurrent and convolution states (`states`) keep one of each row, that of its last
committed token. A row never goes back to an earlier one. With `cache_type` `"int8"` keys and values are
stored in 8 bits (`quantized`), with nothing else changed. Left out on purpose: eviction, paging, prefix sharing.
Use under `torch.no_grad()`: the buffers are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from .kept_buffers import KeptBuffers, new_storages
from .layers import SlotLayer
from .masks import block_masks
from .placement import Placement
from .slot_moves import slot_moves
from .spans import LayerKind, LayerKinds, kinds_from_config, refuse_scaling_by_slot
from .state_tape import LastNodes
from .states import Settle, StateLayer, settle_states
from .stock import HeldLayer, LayerStates, held_length, read_stock_layers

SMALL_SLAB = 256
"""Slots a cache grows by once memory has run out."""


class SpeculativeCache(Cache):
    """Keys and values of `B` rows, each with its own number of committed tokens.

    Args:
        kinds: what each layer keeps.
        batch_size: rows `B`.
        capacity: most slots a row may need: committed tokens and one block.
        block: most tokens written between two commits (the larger of prefill chunk and tree nodes).
        slab: grow full layers in steps of so many slots; `None` allocates `capacity` at once.
        cache_type: `"full"` stores keys and values in the model's dtype, `"int8"` in 8 bits.
        device: where token ids live, hence masks and positions. Each layer's buffers follow that layer's keys.

    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(
        self,
        kinds: LayerKinds,
        *,
        batch_size: int,
        capacity: int,
        block: int,
        slab: int | None = None,
        cache_type: str = "full",
        device: torch.device | str = "cpu",
    ):
        self.capacity, self.slab, self.device = capacity, slab, torch.device(device)
        self.kinds = kinds.within(capacity)
        self.placement = Placement(batch_size, min(block, capacity), self.device)
        self.position_offsets: Tensor | None = None  # (A, B): what a row's slots are short of its positions, by axis
        in_eight_bits = cache_type == "int8"
        layers: list[Any] = [
            make_layer(kind, index, self.placement, in_eight_bits=in_eight_bits)
            for index, kind in enumerate(self.kinds.layers)
        ]
        self.with_states = [layer for layer in layers if isinstance(layer, StateLayer)]
        super().__init__(layers=layers)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig, *, capacity: int, masks_by_type: bool | None = None, **sizes: Any
    ) -> SpeculativeCache:
        """A cache for a model of this configuration; see `kinds_from_config` for `masks_by_type`.

        Raises:
            IncompatibleTargetError: the model has layers that keep what this cache cannot.
        """
        refuse_scaling_by_slot(config, capacity)
        return cls(kinds_from_config(config, masks_by_type), capacity=capacity, **sizes)

    def write_in(self, kept: KeptBuffers, name: str) -> None:
        """Store keys, values and states in memory that outlives this cache, the next one of this name will have it.

        Before anything is written.
        """
        for index, layer in enumerate(self.layers):
            layer.allocate = partial(kept.storages, (name, index))
        for states in self.with_states:
            states.make_state = partial(kept.state, (name, states.index))

    # Lengths -------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Committed tokens per row."""
        return list(self.placement.lengths)

    @property
    def batch_size(self) -> int:
        return self.placement.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row, of every layer."""
        return self.placement.longest

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and states."""
        return sum([layer.num_bytes for layer in self.layers] + [layer.state_bytes for layer in self.with_states])

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of each row instead of every token."""
        return bool(self.with_states)

    # One round -----------------------------------------------------------------------------------------------------

    def place(
        self, num_tokens: int, *, after: int = 0, counts: Sequence[int] | None = None, is_draft: bool = False
    ) -> None:
        """Say where the next forward writes: token `i` of row `b` goes to slot `lengths[b] + after + i`.

        Args:
            num_tokens: tokens per row, `T`.
            after: nodes already written by earlier forwards since the last commit (a drafter grows its tree level by
                level); they keep their numbers `0..after-1`, the new ones continue.
            counts: tokens of each row that layers with states read, what follows in it are pads; default: all.
            is_draft: any number of the tokens may be kept: layers with states record what they read.

        """
        end = self.placement.longest + after + num_tokens
        assert end <= self.capacity, f"{end} slots are needed and {self.capacity} are reserved"
        assert after + num_tokens <= self.block, f"a block of {after + num_tokens} is more than {self.block}"
        self._reserve(end)
        self.placement.place(num_tokens, after)
        if not self.has_states:
            return
        assert not after, "layers with states read a block at once"
        self.placement.read_states(counts, is_draft=is_draft)
        for layer in self.with_states:
            layer.forget_block()

    def _reserve(self, num_slots: int) -> None:
        step = self.slab or self.capacity
        wanted = min(-(-num_slots // step) * step, self.capacity)
        self.placement.reserved_slots = max(self.placement.reserved_slots, wanted)

    def make_room(self, num_slots: int) -> None:
        """Own at least so many slots now instead of during the next forward (a compiled one cannot allocate).

        Call after `place`: what earlier forwards of the round wrote moves along.
        """
        self._reserve(num_slots)
        for layer in self.layers:
            layer.make_room()

    def release(self) -> None:
        """Give back what can be made again, forget what is placed, and grow by small steps from now on."""
        self.slab = min(self.slab or self.capacity, SMALL_SLAB)
        self.placement.reserved_slots = 0
        self.placement.clear()
        for layer in self.with_states:
            layer.release_block()

    @property
    def block(self) -> int:
        """Most tokens written between two commits."""
        return self.placement.block

    @property
    def has_windows(self) -> bool:
        """Whether some layers see only a window of the past."""
        return bool(self.kinds.rings)

    def position_ids(self, depths: Tensor | None = None) -> Tensor:
        """Positions of the placed tokens, `(B, T)`; `(A, B, T)` where the model counts along several axes.

        Args:
            depths: of the placed nodes, `(1 or B, T)`; the root of a tree has depth 0. `None` means a chain.
        """
        placement = self.placement
        positions = placement.chain_slots if depths is None else placement.lengths_tensor[:, None] + depths
        return positions if self.position_offsets is None else positions + self.position_offsets[:, :, None]

    def offset_positions(self, offsets: Tensor | None) -> None:
        """Count along several axes from here on, as a model does behind pictures.

        Args:
            offsets: `(A, B)`, how far positions run ahead of slots along each axis, of each row; `None`: not at all.
        """
        self.position_offsets = None if offsets is None else offsets.to(self.device)

    def attention_mask(
        self,
        ancestors: Tensor | None = None,
        depths: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        none_is_causal: bool = False,
    ) -> Tensor | dict[str, Tensor | None] | None:
        """What stock models take as `attention_mask` for the placed tokens.

        Args:
            ancestors: `[b, i, j]` true where block node `j` is query `i` or above it, `(1 or B, T, M)` with
                `M = after + T`. `None` means a chain.
            depths: of every node of the block, `(1 or B, M)`; asked where some layer sees a window.
            dtype: the model's.
            none_is_causal: whether the model takes `None` for several queries without a past to mean a chain.

        Returns:
            One float mask `(B, 1, T, slots)`, or a dict of them by layer type; 0 is visible, `finfo.min` hidden.
            `None` stands for a mask that hides nothing: eager and SDPA read it so for a single query. Or for a chain;
            see `none_is_causal`.
        """
        return block_masks(self.kinds, self.placement, ancestors, depths, dtype, none_is_causal=none_is_causal)

    def keep(self, nodes: Sequence[Sequence[int]], *, settle: Settle = settle_states) -> None:
        """Commit the nodes that each row accepts, root included, in path order; the rest of the block is dropped.

        Args:
            nodes: their numbers; none of a row that stands still.
            settle: moves states on.
        """
        before = self.lengths
        lengths = [length + len(row) for length, row in zip(before, nodes, strict=True)]
        if self.has_states and lengths != before:
            settle(self.with_states, LastNodes(self.placement.last_state_nodes(nodes), self.device))
        moves = {ring: slot_moves(before, nodes, ring, self.device) for ring in (None, *self.kinds.rings)}
        for layer in self.layers if any(moves.values()) else ():
            needed = moves[layer.ring]
            if needed is not None and layer.is_initialized:
                layer.copy(needed)
        self.placement.set_lengths(lengths)

    def commit(self, num_tokens: int | Sequence[int]) -> None:
        """Commit the first placed tokens of each row (prefill): one number, or one per row of a right-padded chunk."""
        counts = [num_tokens] * self.batch_size if isinstance(num_tokens, int) else num_tokens
        self.keep([range(count) for count in counts])

    def reset(self) -> None:
        """Empty every row; buffers stay allocated."""
        self.placement.set_lengths([0] * self.batch_size)

    def row_tensors(self, length: int) -> list[Tensor]:
        """Where rows of at most `length` tokens lie, live or not: `(rows, ...)` each."""
        slots = [tensor for layer in self.layers for tensor in layer.row_tensors(length)]
        return slots + [state for layer in self.with_states for state in layer.state_buffers]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in ascending order, at the first places. Drops what is placed; buffers that grow are for
        these rows only."""
        for tensor in self.row_tensors(self.placement.longest):
            for place, row in enumerate(rows):
                if place != row:
                    tensor[place].copy_(tensor[row])
        lengths, offsets = self.lengths, self.position_offsets
        self.offset_positions(None if offsets is None else offsets[:, rows])
        self.placement.set_rows([lengths[row] for row in rows])
        self.placement.reserved_rows = len(rows)
        for layer in self.layers:
            layer.allocate = new_storages  # what is lent has room for all rows, and the next text will want it

    # In and out ------------------------------------------------------------------------------------------------------

    def load_dynamic(
        self, dynamic: DynamicCache, padding: Sequence[int] | None = None, *, length: int | None = None
    ) -> None:
        """Take over what a plain `generate` left in its cache.

        Args:
            dynamic: that cache.
            padding: pads in front of each row, which are left there; default: none.
            length: first tokens to take, of windows that have slid and of states all; default: all.

        Raises:
            UnsupportedGenerationError: its layers are of another kind (quantised, static, recurrent), its batch is
                another, or a layer no longer holds what is needed. This cache is then empty.
        """
        self.reset()
        length = held_length(dynamic) if length is None else length
        assert length <= self.capacity, f"got {length} tokens for {self.capacity} slots"
        held = read_stock_layers(dynamic, self.batch_size)
        self._reserve(length)
        lengths = [length - pads for pads in padding or [0] * self.batch_size]
        for index, content in held.items():
            layer = self.layers[index]
            if content.keys is not None and content.values is not None:
                layer.load(content.keys[:, :, :length], content.values[:, :, :length], lengths)
            if content.states:
                assert isinstance(layer, StateLayer)
                layer.load_states(content.states)
        self.placement.set_lengths(lengths)

    def held_row(self, row: int) -> LayerStates:
        """What layers hold of one row, oldest token first; views where they can be."""
        held = {}
        for index, layer in enumerate(self.layers):
            keys, values = layer.held(self.lengths[row], row) if layer.is_initialized else (None, None)
            held[index] = HeldLayer(keys, values, layer.held_states(row) if isinstance(layer, StateLayer) else {})
        return {index: layer for index, layer in held.items() if not layer.is_empty}


def make_layer(kind: LayerKind, index: int, placement: Placement, *, in_eight_bits: bool) -> SlotLayer:
    """An empty layer of this kind."""
    if not kind.num_states:
        return SlotLayer(placement, kind.ring, in_eight_bits=in_eight_bits)
    return StateLayer(placement, kind.ring, in_eight_bits=in_eight_bits, num_states=kind.num_states, index=index)
