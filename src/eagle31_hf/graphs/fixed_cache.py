"""A speculative cache as compiled code wants it: shapes and Python values that stay as they are from round to round.

The buffers are those of a `SpeculativeCache`, whole: every query sees all of their slots, and the mask hides what is
not its own. Where a block is written is a tensor, not a number, so that a graph made in one round serves the next.

Committed states are read and not written: a layer hands out states of its own, made in the step, and what the block
leaves is among the step's outputs (`BlockTrace`). How much of it is kept is known after the step, and then another one
moves the states on (`verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..cache.graph_sizes import slot_bucket
from ..cache.layers import SlotLayer
from ..cache.masks import block_masks
from ..cache.placement import Placement
from ..cache.row_pool import RowPool
from ..cache.speculative import SpeculativeCache
from ..cache.state_tape import Recorded
from ..cache.states import BlockTrace, StateLayer
from ..drafting.host_numbers import on_device
from ..errors import UnsupportedGenerationError


class FixedPlacement(Placement):
    """Of blocks whose slots are given, as a tensor, before each forward of a step; all slots of buffers are seen."""

    start = None  # type: ignore[assignment]
    chain_slots: Tensor = None  # type: ignore[assignment]
    visible_slots = 0  # type: ignore[assignment]

    def place_at(self, slots: Tensor, visible_slots: int) -> None:
        """The next forward writes `slots (B, T)` of full layers, one behind the other. Host arithmetic only."""
        self.set_lengths([1] * len(slots))  # of states, all that counts is that they have begun
        self.chain_slots, self.num_tokens, self.device = slots, slots.shape[1], slots.device
        self.visible_slots, self.rows_alike = visible_slots, False
        _ = self.slots  # made before the first layer, which else would compute something else than its like

    @property
    def lengths_tensor(self) -> Tensor:
        return self.chain_slots[:, 0]

    @property
    def block_slots(self) -> int:
        return self.block


class FixedLayer(SlotLayer):
    """The buffers of one `SlotLayer`, all of whose slots every query sees."""

    def take(self, layer: SlotLayer, num_slots: int) -> None:
        """Stand for the first slots of this layer's rows; its buffers may have more of either."""
        held, shape = self.keys, (layer.placement.batch_size, num_slots)
        stands = held is not None and (held.data_ptr(), held.stride()) == (layer.keys.data_ptr(), layer.keys.stride())
        if not stands or held.shape[::2] != shape:  # making views takes its time
            self._replace_storages(buffer[: shape[0], :, :num_slots] for buffer in (layer.keys, layer.values))
            self.device, self.is_initialized = layer.device, True

    @property
    def step_buffers(self) -> list[Tensor]:
        """The buffers that steps read and write."""
        return [*self.storages]

    def read(self) -> tuple[Tensor, Tensor]:
        """All slots `(B, heads, slots, D)`."""
        return self.keys, self.values

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        # The answer would be frozen into the graph: right this round, wrong in the next.
        raise UnsupportedGenerationError("the target asks its cache for its length or for memory, which graphs cannot")

    get_mask_sizes = get_seq_length = lazy_initialization = _refuse


class FixedStates(FixedLayer, StateLayer):  # type: ignore[misc]
    """The committed states of one `StateLayer`, and its keys and values if it attends.

    Args:
        placement: of the blocks that steps read.
        source: whose states they are.
    """

    def __init__(self, placement: Placement, source: StateLayer):
        StateLayer.__init__(self, placement, source.ring, num_states=source.number_of_states, index=source.index)

    def take_states(self, source: StateLayer) -> None:
        """Stand for the states that this layer has committed of its rows."""
        for key, state in source.committed.items():
            self._hold(key, state)

    def trace(self) -> BlockTrace:
        """As of any layer; outputs of a step must not be weights themselves."""
        trace = super().trace()
        if trace.recorded is None:
            return trace
        inputs = [each.clone() if isinstance(each, nn.Parameter) else each for each in trace.recorded.inputs]
        return trace._replace(recorded=Recorded(trace.recorded.recurrence, tuple(inputs)))

    @property
    def step_buffers(self) -> list[Tensor]:
        return [*self.storages, *self.state_buffers]


class FixedShapeCache(Cache):
    """Stands in for `source` during compiled forwards; holds its buffers, never copies them.

    A step says where each forward in it writes: `at(slots)`.
    """

    takes_outputs = False
    layers: list[FixedLayer]  # type: ignore[assignment]

    def __init__(self, source: SpeculativeCache):
        placement = FixedPlacement(source.batch_size, source.block, source.device)
        self.kinds, self.placement = source.kinds, placement
        layers: list[Any] = [
            FixedStates(placement, layer) if isinstance(layer, StateLayer) else FixedLayer(placement, layer.ring)
            for layer in source.layers
        ]
        super().__init__(layers=layers)
        self.with_states = [layer for layer in layers if isinstance(layer, FixedStates)]

    def at(self, slots: Tensor) -> FixedShapeCache:
        """These buffers, whose next forward writes `slots (B, T)` of full layers."""
        full = [layer for layer in self.layers if layer.is_initialized and layer.ring is None]
        self.placement.place_at(slots, full[0].keys.shape[2] if full else 0)
        if self.with_states:
            self.placement.read_states(None, is_draft=True)
        for layer in self.with_states:
            layer.release_block()
            layer.has_previous_state = dict.fromkeys(range(layer.number_of_states), True)
        return self

    def traces(self) -> tuple[BlockTrace, ...]:
        """What the step has left in each layer with states, which keep nothing of it."""
        traces = tuple([layer.trace() for layer in self.with_states])
        for layer in self.with_states:
            layer.release_block()
        return traces

    def follow(self, source: SpeculativeCache, num_slots: int) -> None:
        """Take the buffers `source` has now: growing replaces them, and rows come and go.

        Args:
            num_slots: of full layers that graphs look at.
        """
        if source.batch_size != self.placement.batch_size:
            self.placement.set_rows([0] * source.batch_size)
        for fixed, layer in zip(self.layers, source.layers, strict=True):
            if isinstance(fixed, FixedStates) and isinstance(layer, StateLayer):
                fixed.take_states(layer)
            if layer.is_initialized:
                # A layer that shares another's keys and values has none.
                fixed.take(layer, num_slots if fixed.ring is None else layer.num_slots)

    def masks(self, dtype: torch.dtype, ancestors: Tensor | None = None, depths: Tensor | None = None) -> Any:
        """As `SpeculativeCache.attention_mask`, made in the graph, over all slots."""
        return block_masks(self.kinds, self.placement, ancestors, depths, dtype, none_is_causal=False)


class CommittedStates:
    """The committed states of a cache, lent to a step that moves them on: what it gives is written over them.

    Args:
        sources: the cache's layers with states.
    """

    takes_outputs = True

    def __init__(self, sources: Sequence[StateLayer]):
        self.placement = Placement(1, 1, torch.device("cpu"))  # of which layers ask how many rows there are
        self.layers = [FixedStates(self.placement, source) for source in sources]

    def follow(self, sources: Sequence[StateLayer]) -> None:
        """Take the states that these layers have now."""
        if (rows := sources[0].placement.batch_size) != self.placement.batch_size:
            self.placement.set_rows([0] * rows)
        for layer, source in zip(self.layers, sources, strict=True):
            layer.take_states(source)


# --- what steps read beside it ----------------------------------------------------------------------------------------


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

    @property
    def rows_pay(self) -> bool:
        """Whether graphs are made for as many rows as there are now: a batch that loses rows is not worth a graph for
        each number of them; a pool's numbers come back."""
        rows = self.cache.batch_size
        return rows <= MOST_POOLED_ROWS if self._is_pool else rows == self._first_rows

    def make_room(self, block_end: int) -> bool:
        """Whether the placed block, padded to `block_end`, fits; if so, the buffers have a bucket's length.

        Not where nothing of some row was read yet: graphs take buffers and begun states for granted.
        """
        slots = max(self.cache.lengths) + block_end
        if block_end > self.cache.block or slots > self.cache.capacity or not min(self.cache.lengths):
            return False
        needed = min(slot_bucket(slots), self.cache.capacity)
        self.cache.make_room(needed)
        # A pool's rows are as long as any text may get; graphs look at what the present ones need.
        self.num_slots = needed if self._is_pool else self.cache.placement.reserved_slots
        return True

    @property
    def mask_widths(self) -> dict[str, int]:
        """Slots that graphs look at behind each mask, by layer type."""
        kinds, block = self.cache.kinds.by_mask.items(), self.cache.block
        return {name: self.num_slots if kind.ring is None else kind.ring + block for name, kind in kinds}

    def slots(self, num_tokens: int, *, after: int = 0) -> Tensor:
        """Slots `(B, T)` of tokens `after ... after + num_tokens - 1` of each row's block, in the present buffers."""
        self.fixed.follow(self.cache, self.num_slots)
        slots = [range(length + after, length + after + num_tokens) for length in self.cache.lengths]
        return on_device(slots, self.cache.device)


def padded(tensor: Tensor, *sizes: int) -> Tensor:
    """The tensor, its last dimensions filled up to these sizes. Nothing reads what is behind, or a mask hides it."""
    missing = [size - own for size, own in zip(sizes, tensor.shape[-len(sizes) :], strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [pad for size in reversed(missing) for pad in (0, size)])
