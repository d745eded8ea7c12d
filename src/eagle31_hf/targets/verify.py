"""The target over a draft tree: all nodes in one stock forward, which a mask and positions tell apart."""

from __future__ import annotations

from torch import Tensor

from ..cache.placement import BlockReading
from ..cache.speculative import SpeculativeCache
from ..drafting.draft_tree import DraftTree
from .binding import TargetBinding, TargetOutput


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
        assert tree.is_chain or not self.cache.has_states, "layers with states read chains"
        self.cache.place(tree.size, reading=BlockReading.of_drafts())
        positions = self.cache.position_ids(tree.positions)
        return self.binding.forward(tree.tokens, positions, self.mask(tree), self.cache)

    def mask(self, tree: DraftTree) -> Tensor | dict[str, Tensor | None] | None:
        """Which nodes see which: what the target takes as `attention_mask` for the placed tree."""
        ancestors, depths = (None, None) if tree.is_chain else (tree.ancestors, tree.positions)
        return self.cache.attention_mask(ancestors, depths, self.binding.compute_dtype)
