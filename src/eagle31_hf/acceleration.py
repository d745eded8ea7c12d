"""Compiled steps: the target's verify forward and the drafter's draft step, one graph per shape bucket.

`torch.compile` pays only where shapes repeat, so blocks are padded to a few node counts, rows to a few lengths
(buckets of 256 slots, then doubling), and what is padded is masked. The first call at a new shape is served by the
eager code, which is the reference: a graph that cannot be made, or that disagrees, is given up and the text goes on
unchanged. Prefill and single tokens always stay eager.

On CUDA the graphs are replayed as CUDA graphs (`mode="reduce-overhead"`) and their outputs copied out of the pool; a
greedy chain of fixed length is one graph. On a CPU that would only cost compile time: chains there end by doubt.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from .cache import SpeculativeCache
from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import CompiledSteps, Step
from .drafter import Eagle31Drafter
from .drafting import DraftSession, DraftState
from .stats import SpeculationStats
from .target import TargetBinding, TargetOutput

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
        """`source` in the leading corner of a buffer; the rest holds whatever was there, and nothing reads it."""
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


class _Placed:
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


class CompiledForward:
    """Verification forwards of one generation: called like `TargetBinding.forward`, compiled where shapes allow.

    Args:
        drafter: attached to the target.
        cache: the target's, with `capacity` and `block` as `slot_bucket` gives them.
        most_nodes: most nodes of a round.
        stats: told why steps stay eager, if they do.
    """

    def __init__(self, drafter: Eagle31Drafter, cache: SpeculativeCache, *, most_nodes: int, stats: SpeculationStats):
        self.binding = drafter.require_binding()
        self.steps = CompiledSteps.of(drafter)
        self.most_nodes, self.stats = most_nodes, stats
        self.placed = _Placed(cache)
        self.first_rows = cache.batch_size
        _note(self.steps, stats)

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Masks, cache: SpeculativeCache) -> TargetOutput:
        """See `TargetBinding.forward`; logits of all tokens `(B, T, V)`."""
        rows, size = tokens.shape
        nodes = node_bucket(size, self.most_nodes)
        _note(self.steps, self.stats)  # a draft step may have failed
        if self.steps.why_not or size == 1 or not self.placed.make_room(nodes):
            return self.binding.forward(tokens, positions, mask, cache)
        widths = cache.mask_widths
        shape = ("verify", rows, nodes, *widths.items(), self.binding.model.config._attn_implementation)
        known = self.steps.has(shape)
        if not known and rows != self.first_rows:  # a batch that loses rows is not worth a graph for each number
            return self.binding.forward(tokens, positions, mask, cache)
        inputs = self._inputs(tokens, positions, self._masks(mask, widths, rows, nodes), nodes)
        outputs = self.steps.run(shape, inputs)
        if outputs is not None:
            logits, aux = outputs
            return TargetOutput(logits[:, :size], aux[:, :size])
        output = self.binding.forward(tokens, positions, mask, cache)
        if not known:
            self.steps.add(shape, _verify_step(self.binding), inputs, output.logits)
        _note(self.steps, self.stats)
        return output

    def _inputs(self, tokens: Tensor, positions: Tensor, masks: Masks, nodes: int) -> tuple:
        buffers, shape = self.placed.inputs, (tokens.shape[0], nodes)
        self.placed.point_at(0, nodes)
        return (
            buffers.fill("tokens", tokens, shape),
            buffers.fill("positions", positions, shape),
            masks,
            self.placed.fixed,
        )

    def _masks(self, mask: Masks, widths: dict[str, int], rows: int, nodes: int) -> Masks:
        assert mask is not None, "only single tokens go without a mask"
        if isinstance(mask, Tensor):
            (width,) = widths.values()
            return self.placed.inputs.fill_mask("mask", mask, (rows, 1, nodes, width))
        fill = self.placed.inputs.fill_mask
        return {kind: fill(kind, mask[kind], (rows, 1, nodes, width)) for kind, width in widths.items()}  # type: ignore[arg-type]


def _verify_step(binding: TargetBinding) -> Step:
    def verify(tokens: Tensor, positions: Tensor, masks: Masks, cache: FixedShapeCache) -> tuple[Tensor, Tensor]:
        output = binding.forward(tokens, positions, masks, cache)
        return output.logits, output.aux  # type: ignore[return-value]

    return verify


class CompiledDraftSession(DraftSession):
    """A draft session whose steps are compiled; what is absorbed stays eager, its width being another every round."""

    def __init__(self, drafter: Eagle31Drafter, *, batch_size: int, capacity: int, block: int):
        super().__init__(
            drafter, batch_size=batch_size, capacity=slot_bucket(capacity + NODE_BUCKET), block=slot_bucket(block)
        )
        self.cache.slab = SLOT_BUCKET
        self.steps = CompiledSteps.of(drafter)
        self.placed = _Placed(self.cache)
        self.first_rows = batch_size
        self.chain_depth = 0  # of the deepest chain so far; shallower ones are cut from it

    @property
    def chains_at_once(self) -> bool:
        """Whether greedy chains of fixed length are one graph."""
        return self.cache.device.type == "cuda"

    def draft_at_once(self, depth: int) -> Tensor | None:
        self.chain_depth = deepest = max(depth, self.chain_depth)
        rows = self.cache.batch_size
        if not self.chains_at_once or self.steps.why_not:
            return None
        self.cache.place(1)
        if not self.placed.make_room(deepest):
            return None
        (slots,) = self.cache.mask_widths.values()
        shape, inputs = ("chain", rows, deepest, slots), self._chain_inputs(deepest)
        if not self.steps.has(shape) and rows == self.first_rows:
            self.steps.add(shape, _draft_chain(self.drafter, deepest), inputs, None)
        outputs = self.steps.run(shape, inputs)
        return None if outputs is None else outputs[0][:, :depth]

    def _chain_inputs(self, depth: int) -> tuple:
        fill, root = self.placed.inputs.fill, self.root
        self._rotary_at(depth)
        assert self._rotary is not None, "just made"
        cos, sin = (table[:, :depth] for table in self._rotary)  # (B, depth, d)
        self.placed.point_at(0, depth)
        return (
            fill("root", root.logits, tuple(root.logits.shape)),
            fill("feedback", root.feedback, tuple(root.feedback.shape)),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            self.placed.fixed,
        )

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        rows, size = tokens.shape
        width = 1 << (size - 1).bit_length()
        self.cache.place(size, after=after)
        if self.steps.why_not or not self.placed.make_room(after + width):
            return super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        (slots,) = self.cache.mask_widths.values()
        mask = self._mask(ancestors, (rows, 1, width, slots))
        shape = ("step", rows, width, slots, mask is not None)
        known = self.steps.has(shape)
        if not known and rows != self.first_rows:
            return super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        inputs = self._inputs(tokens, feedback, after, depth, mask)
        outputs = self.steps.run(shape, inputs)
        if outputs is not None:
            logits, feedback = outputs
            return DraftState(logits[:, :size], feedback[:, :size])
        state = super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        if not known:
            self.steps.add(shape, _draft_step(self.drafter), inputs, state.logits)
        return state

    def _mask(self, ancestors: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """`None` for a chain, whose mask the graph makes itself."""
        mask = None if ancestors is None else self.cache.attention_mask(ancestors, dtype=self.drafter.dtype)
        return None if mask is None else self.placed.inputs.fill_mask("mask", mask, shape)  # type: ignore[arg-type]

    def _inputs(self, tokens: Tensor, feedback: Tensor, after: int, depth: int, mask: Tensor | None) -> tuple:
        fill, (rows, size) = self.placed.inputs.fill, tokens.shape
        width = 1 << (size - 1).bit_length()
        cos, sin = self._rotary_at(depth)
        self.placed.point_at(after, width)
        return (
            fill("tokens", tokens, (rows, width)),
            fill("feedback", feedback, (rows, width, feedback.shape[-1])),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            mask,
            self.placed.fixed,
        )


def _draft_step(drafter: Eagle31Drafter) -> Step:
    def draft(
        tokens: Tensor,
        feedback: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: FixedShapeCache,
    ) -> tuple[Tensor, Tensor]:
        if mask is None:  # a row sees its slots up to the one it writes
            slots = cache.block.slots  # (B, T)
            columns = torch.arange(cache.layers[0].keys.shape[2], device=slots.device)
            hidden = columns > slots[:, None, :, None]  # (B, 1, T, S)
            mask = torch.zeros(hidden.shape, dtype=feedback.dtype, device=slots.device)
            mask = mask.masked_fill(hidden, torch.finfo(feedback.dtype).min)
        out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, cache)
        return drafter.draft_logits(out.normed), out.feedback

    return draft


def _draft_chain(drafter: Eagle31Drafter, depth: int) -> Step:
    draft = _draft_step(drafter)

    def chain(
        root: Tensor, feedback: Tensor, rotary: tuple[Tensor, Tensor], cache: FixedShapeCache
    ) -> tuple[Tensor, Tensor]:
        slots, ids, logits, tokens = cache.block.slots, drafter.draft_ids, root, []
        for k in range(depth):
            choice = logits[:, -1].argmax(-1)
            tokens.append(choice if ids is None else ids[choice])
            if k + 1 < depth:
                here = slice(k, k + 1)
                cache.block.slots = slots[:, here]
                cos, sin = (table[:, here] for table in rotary)
                logits, feedback = draft(tokens[-1][:, None], feedback, (cos, sin), None, cache)
        cache.block.slots = slots
        return torch.stack(tokens, 1), feedback  # (B, depth), (B, 1, H)

    return chain


def _note(steps: CompiledSteps, stats: SpeculationStats) -> None:
    if steps.why_not and steps.why_not not in stats.fallbacks:
        stats.fallbacks.append(steps.why_not)
