"""Compiled steps, one graph per shape bucket: the target's verify forward here, the drafter's in `compiled_drafting`,
what comes between a forward and the next draft in `compiled_round_end`.

`torch.compile` pays only where shapes repeat, so blocks are padded to a few node counts, rows to a few lengths
(buckets of 256 slots, then doubling), and what is padded is masked. The first call at a new shape is served by the
eager code, which is the reference: a graph that cannot be made, or that disagrees, is given up and the text goes on
unchanged. Prefill always stays eager, and no graph is made for a single token.

With chains of fixed length and dynamic trees a round is two graphs, drawn or not: the target's, and one that judges
the drafts, reads what was accepted and drafts again. A chain that doubt may end and a static tree take a graph per
step. Graphs make their masks themselves, unless layers see only a window.
On CUDA the graphs are replayed as CUDA graphs (`mode="reduce-overhead"`) and their outputs copied out of the pool.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .cache import SpeculativeCache
from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import CompiledSteps, Step
from .stats import SpeculationStats
from .target import TargetBinding, TargetOutput
from .tree import DraftTree
from .verification import Verification

Masks = Tensor | dict[str, Tensor | None] | None

SLOT_BUCKET = 256
"""Smallest row length compiled for; longer ones double it, so a generation meets few of them."""

NODE_BUCKET = 8
"""Verified nodes are padded to this or, beyond it, to the most a round may have, rounded up to a multiple of this."""


def slot_bucket(num_slots: int) -> int:
    """Row length to allocate where `num_slots` are needed."""
    return SLOT_BUCKET << max(0, (num_slots - 1) // SLOT_BUCKET).bit_length()


def node_bucket(num_nodes: int, most: int) -> int:
    """Nodes to verify where there are `num_nodes`, and never more than `most` in a round."""
    return NODE_BUCKET if num_nodes <= NODE_BUCKET else -(-most // NODE_BUCKET) * NODE_BUCKET


class InputBuffers:
    """Tensors of fixed shape that a step reads; the same memory every round, as graphs want it."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def fill(self, name: str, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`source` in the leading corner of a buffer; the rest holds whatever was there, and nothing reads it.

        On a CPU, where graphs take memory from anywhere, a source of that very shape is taken as it is.
        """
        if source.device.type == "cpu" and tuple(source.shape) == shape and source.is_contiguous():
            # Dimensions of size 1 have any stride, by which graphs would be told apart.
            return source if source.stride() == _dense_strides(shape) else source.view(-1).view(shape)
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


@lru_cache(maxsize=256)
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


class PlacedSteps:
    """Slots and buffers of the running step."""

    def __init__(self, cache: SpeculativeCache):
        self.cache = cache
        self.fixed = FixedShapeCache(cache)
        self.inputs = InputBuffers()
        self._numbers = torch.arange(cache.block, device=cache.device)

    def make_room(self, block_end: int) -> bool:
        """Whether the placed block, padded to `block_end`, fits; if so, the buffers have a bucket's length."""
        slots = max(self.cache.lengths) + block_end
        if block_end > self.cache.block or slot_bucket(slots) > self.cache.capacity:
            return False
        self.cache.make_room(slot_bucket(slots))
        return True

    def point_at(self, after: int, num_tokens: int) -> None:
        """Let the fixed cache write tokens `after ... after + num_tokens - 1` of each row's block."""
        slots = self.cache.lengths_tensor[:, None] + self._numbers[after : after + num_tokens]
        self.fixed.follow(self.cache, self.inputs.fill("slots", slots, tuple(slots.shape)))
        if slots.device.type == "cuda":
            # CUDA graphs write in place only where they are told the memory stays; unguarded, since the next
            # generation brings buffers of its own and may use the same graph.
            for layer in self.fixed.layers:
                if layer.is_initialized:
                    torch._dynamo.mark_static_address(layer.keys, guard=False)
                    torch._dynamo.mark_static_address(layer.values, guard=False)


class CompiledVerification(Verification):
    """Verification forwards of one generation, compiled where shapes allow.

    Args:
        binding, cache: as in `Verification`; the cache with `capacity` and `block` as `slot_bucket` gives them.
        steps: this generation's.
        most_nodes: most nodes of a round.
        stats: told why steps stay eager, if they do.
    """

    def __init__(
        self,
        binding: TargetBinding,
        cache: SpeculativeCache,
        steps: CompiledSteps,
        *,
        most_nodes: int,
        stats: SpeculationStats,
    ):
        super().__init__(binding, cache)
        self.steps = steps
        self.most_nodes, self.stats = most_nodes, stats
        self.placed = PlacedSteps(cache)
        self.first_rows = cache.batch_size
        note_why_not(self.steps, stats)

    def _forward(self, tree: DraftTree) -> TargetOutput:
        rows, size = tree.tokens.shape
        nodes = node_bucket(size, self.most_nodes)
        note_why_not(self.steps, self.stats)  # a draft step may have failed
        unmasked = size == 1 and self.cache.has_windows  # padding would want a mask of each kind of layer
        if self.steps.why_not or unmasked or not self.placed.make_room(nodes):
            return super()._forward(tree)
        masks_trees = not tree.is_chain and not self.cache.has_windows  # by what a chain's graph does not read
        attention = self.binding.model.config._attn_implementation
        shape = ("verify", rows, nodes, masks_trees, *self.cache.mask_widths.items(), attention)
        known = self.steps.has(shape)
        # A batch that loses rows is not worth a graph for each number, nor is the last token of a text one of its own.
        if not known and (rows != self.first_rows or size == 1):
            return super()._forward(tree)
        inputs = self._inputs(tree, (rows, nodes), tree.ancestors if masks_trees else None)
        outputs = self.steps.run(shape, inputs)
        if outputs is not None:
            logits, aux = outputs
            return TargetOutput(logits[:, :size], aux[:, :size])
        output = super()._forward(tree)
        if not known:
            self.steps.add(shape, _verify_step(self.binding), inputs, output.logits)
        note_why_not(self.steps, self.stats)
        return output

    def _inputs(self, tree: DraftTree, shape: tuple[int, int], ancestors: Tensor | None) -> tuple:
        """What a graph reads; masks only where it cannot make them itself."""
        fill, (rows, nodes) = self.placed.inputs.fill, shape
        self.placed.point_at(0, nodes)
        depths = F.pad(tree.depths, (0, nodes - tree.size))  # padding has the root's position, which is a valid one
        return (
            fill("tokens", tree.tokens, shape),
            fill("depths", depths, shape),
            None if ancestors is None else fill("ancestors", ancestors, (rows, nodes, nodes)),
            self._masks(tree, rows, nodes) if self.cache.has_windows else None,
            self.placed.fixed,
        )

    def _masks(self, tree: DraftTree, rows: int, nodes: int) -> Masks:
        mask, widths, fill = self._mask(tree), self.cache.mask_widths, self.placed.inputs.fill_mask
        assert mask is not None, "single tokens, which go without a mask, stay eager"
        if isinstance(mask, Tensor):
            (width,) = widths.values()
            return fill("mask", mask, (rows, 1, nodes, width))
        return {kind: fill(kind, mask[kind], (rows, 1, nodes, width)) for kind, width in widths.items()}  # type: ignore[arg-type]


def _verify_step(binding: TargetBinding) -> Step:
    dtype = binding.compute_dtype

    def verify(
        tokens: Tensor, depths: Tensor, ancestors: Tensor | None, masks: Masks, cache: FixedShapeCache
    ) -> tuple[Tensor, Tensor]:
        positions = cache.block.slots[:, :1] + depths  # (B, N)
        if masks is None:
            masks = cache.by_type(cache.block_mask(dtype, ancestors))
        output = binding.forward(tokens, positions, masks, cache)
        return output.logits, output.aux  # type: ignore[return-value]

    return verify


def note_why_not(steps: CompiledSteps, stats: SpeculationStats) -> None:
    if steps.why_not and steps.why_not not in stats.fallbacks:
        stats.fallbacks.append(steps.why_not)
