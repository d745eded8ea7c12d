"""A target's verification as graphs of fixed shape.

`torch.compile` pays only where shapes repeat, so blocks are padded to the sizes of `shapes`, and what is padded is
masked. The first call at a new shape is served by the eager code, which is the reference: a graph that cannot be made,
or that disagrees, is given up and the text goes on unchanged (`graphs`). Prefill always stays eager, and no graph is
made for a single token. Graphs make their masks themselves, unless layers see only a window.

On CUDA the graphs are replayed as CUDA graphs (`mode="reduce-overhead"`) and their outputs copied out of the pool.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..cache import SpeculativeCache
from ..target.binding import TargetBinding, TargetOutput
from ..target.verify import Verification
from ..trees.draft_tree import DraftTree
from .fixed_cache import FixedShapeCache
from .graphs import GraphKey, Graphs, Step
from .inputs import GraphInputs
from .shapes import node_bucket

Masks = Tensor | dict[str, Tensor | None] | None


class CompiledVerification:
    """Verification forwards of one generation, compiled where shapes allow; called as `Verification` is.

    Args:
        binding, cache: as in `Verification`; the cache of a size that `shapes.cache_size` gives.
        graphs: the pair's.
        most_nodes: most nodes of a round.
    """

    def __init__(self, binding: TargetBinding, cache: SpeculativeCache, graphs: Graphs, *, most_nodes: int):
        self.binding, self.cache, self.graphs, self.most_nodes = binding, cache, graphs, most_nodes
        self.eager = Verification(binding, cache)
        self.inputs = GraphInputs(cache)
        self.first_rows = cache.batch_size

    def __call__(self, tree: DraftTree) -> TargetOutput:
        """As `Verification`; the binding must be capturing."""
        rows, size = tree.tokens.shape
        nodes = node_bucket(size, self.most_nodes)
        self.cache.place(size)
        unmasked = size == 1 and self.cache.has_windows  # padding would want a mask of each kind of layer
        if unmasked or not self.inputs.make_room(nodes):
            return self.eager(tree)
        masks_trees = not tree.is_chain and not self.cache.has_windows  # by what a chain's graph does not read
        attention = self.binding.model.config._attn_implementation
        # A batch that loses rows is not worth a graph for each number, nor is the last token of a text one of its own.
        pays = rows == self.first_rows and size > 1
        offsets = self.cache.position_offsets
        axes = 0 if offsets is None else len(offsets)
        output = self.graphs.run_or_eager(
            GraphKey("verify", rows, nodes, (masks_trees, axes, *self.cache.mask_widths.items(), attention)),
            partial(_verify_step, self.binding) if pays else None,
            lambda: self._inputs(tree, nodes, masks_trees),
            lambda: self.eager(tree),
        )
        return TargetOutput(output.logits[:, :size], output.aux[:, :size])

    def _inputs(self, tree: DraftTree, nodes: int, masks_trees: bool) -> tuple:
        """What a graph reads; masks only where it cannot make them itself."""
        inputs, rows, offsets = self.inputs, len(tree.tokens), self.cache.position_offsets
        inputs.fixed.block.slots = inputs.slots(nodes)
        positions = F.pad(tree.positions, (0, nodes - tree.size))  # padding has the root's, which is a valid one
        if offsets is not None:
            positions = positions + offsets[:, :, None]  # (A, B, N)
        return (
            inputs.fill("tokens", tree.tokens, (rows, nodes)),
            inputs.fill("positions", positions, (rows, nodes) if offsets is None else (len(offsets), rows, nodes)),
            inputs.fill("ancestors", tree.ancestors, (rows, nodes, nodes)) if masks_trees else None,
            self._masks(tree, rows, nodes) if self.cache.has_windows else None,
            inputs.fixed,
        )

    def _masks(self, tree: DraftTree, rows: int, nodes: int) -> Masks:
        mask, widths, fill = self.eager.mask(tree), self.cache.mask_widths, self.inputs.fill_mask
        assert mask is not None, "single tokens, which go without a mask, stay eager"
        if isinstance(mask, Tensor):
            (width,) = widths.values()
            return fill("mask", mask, (rows, 1, nodes, width))
        return {kind: fill(kind, mask[kind], (rows, 1, nodes, width)) for kind, width in widths.items()}  # type: ignore[arg-type]


def _verify_step(binding: TargetBinding) -> Step:
    dtype = binding.compute_dtype

    def verify(
        tokens: Tensor, positions: Tensor, ancestors: Tensor | None, masks: Masks, cache: FixedShapeCache
    ) -> TargetOutput:
        slots = cache.block.slots
        if masks is None:
            masks = cache.by_type(cache.at(slots).mask(dtype, ancestors))
        return binding.forward(tokens, slots[:, :1] + positions, masks, cache)

    return verify
