"""A draft tree as data: tokens, parents, depths, masks, paths.

Node 0 is the root, the last token the target has accepted; every other node is a drafted token whose parent has a
smaller number. Verification reads `tokens`, `depths` and `ancestors`; acceptance reads `tokens` and `parents`. Two ways
to make one:

    DraftTree.chain(tokens)         width 1
    drafter.dynamic.grow_tree(...)  by confidence (EAGLE-2, EAGLE-3)

Nothing here waits for the device, so all of it can be captured in a CUDA graph. The shapes
of chains are cached per device: run once before capturing, as for any captured step.

`B` batch, `N` nodes with the root, `D` longest path without the root, `k` top-k, `V` / `Vd` target / draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor


def to_target_ids(choices: Tensor, support: Tensor | None) -> Tensor:
    """Target ids `(R, n)` of entries `choices (R, n)` of a support `(S,)`, or `(R, S)` row by row, or `None`."""
    if support is None:
        return choices
    return support.take(choices) if support.dim() == 1 else support.gather(1, choices)


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of one round, one tree of `N` nodes per row.

    Attributes:
        tokens: `(B, N)` int64 target ids; node 0 is the last accepted token.
        parents: `(B, N)` int64; the root is its own parent, every other parent has a smaller number.
        depths: `(B, N)` int64; root 0.
        ancestors: `(B, N, N)` bool; `[b, i, j]`: `j` is `i` or above it.
        max_depth: `D`, no accepted path is longer (known without asking the device; the longest may be shorter).
        is_chain: every node has at most one child, so node `i` hangs below node `i - 1`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    max_depth: int
    is_chain: bool

    @classmethod
    def chain(cls, tokens: Tensor) -> DraftTree:
        """A tree of width 1: `tokens (B, K+1)`, the last accepted token and `K` drafts in order."""
        batch, size = tokens.shape
        return cls(tokens, *_of_chains(batch, size, tokens.device), max_depth=size - 1, is_chain=True)

    @property
    def size(self) -> int:
        """Nodes per row, root included."""
        return self.tokens.shape[1]

    def cut_to(self, depth: int) -> DraftTree:
        """This tree with paths of no more than `depth` levels; deeper nodes are verified in vain, so that forwards keep
        their shape, as if they lay at that depth: positions behind a text's end may not exist."""
        if depth >= self.max_depth:
            return self
        return replace(self, max_depth=depth, depths=self.depths.clamp(max=depth))


@lru_cache(maxsize=64)
def chain_ancestors(size: int, device: torch.device | str = "cpu") -> Tensor:
    """`(size, size)` bool lower triangle: the `ancestors` of a chain, and of a prefill chunk. Cached: do not write."""
    with torch.inference_mode(False):  # a cached inference tensor would be refused by a later training step
        return torch.ones(size, size, dtype=torch.bool, device=device).tril_()


@lru_cache(maxsize=64)
def _of_chains(batch: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ancestors. Cached: do not write."""
    with torch.inference_mode(False):
        depths = torch.arange(size, device=device)
        of_one = (depths - 1).clamp_(min=0), depths, chain_ancestors(size, device)
        parents, depths, ancestors = (each.expand(batch, *each.shape) for each in of_one)
        return parents, depths, ancestors


def ancestors_from_parents(parents: Tensor, max_depth: int) -> Tensor:
    """Reachability of parent links, `parents (B, N)` -> `(B, N, N)` bool, by repeated squaring of one step."""
    batch, size = parents.shape
    links = torch.zeros(batch, size, size, device=parents.device).scatter_(2, parents[:, :, None], 1.0)
    reach = links + torch.eye(size, device=parents.device)  # by no step or one
    steps = 1
    while steps < max_depth:
        reach = torch.bmm(reach, reach).clamp_(max=1.0)  # lest the ways to go, which are summed, overflow
        steps *= 2
    return reach > 0
