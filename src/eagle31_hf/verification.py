"""The target over a draft tree: all nodes in one stock forward, which a mask and positions tell apart."""

from __future__ import annotations

from torch import Tensor

from .cache import SpeculativeCache
from .target import TargetBinding, TargetOutput
from .tree import DraftTree


class Verification:
    """Verification forwards over one cache.

    Args:
        binding: of the target.
        cache: holds what the trees follow; nothing is committed.
    """

    def __init__(self, binding: TargetBinding, cache: SpeculativeCache):
        self.binding, self.cache = binding, cache

    def __call__(self, tree: DraftTree) -> TargetOutput:
        """Logits `(B, N, V)` and, while the binding captures them, hidden states `(B, N, A*Ht)` of every node."""
        self.cache.place(tree.size)
        return self._forward(tree)

    def _forward(self, tree: DraftTree) -> TargetOutput:
        positions = self.cache.position_ids(tree.depths)
        return self.binding.forward(tree.tokens, positions, self._mask(tree), self.cache)

    def _mask(self, tree: DraftTree) -> Tensor | dict[str, Tensor | None] | None:
        ancestors, depths = (None, None) if tree.is_chain else (tree.ancestors, tree.depths)
        return self.cache.attention_mask(ancestors, depths, self.binding.compute_dtype)
