"""Trees whose shape follows the drafter's confidence: grown level by level, then pruned (EAGLE-2 §4.1; EAGLE-3).

Nothing here waits for the device, so a tree can be grown in a graph. `k` is top-k; other letters as in `draft_tree`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree, ancestors_from_parents
from ..errors import ConfigurationError


@dataclass(frozen=True)
class Frontier:
    """The `k` nodes the drafter expands next.

    Attributes:
        draft_ids: `(B, k)` their tokens, ids of the draft vocabulary.
        scores: `(B, k)` cumulative log-probabilities.
        parent_rows: `(B, k)` their parents' rows in the frontier before; gather feedback hidden states by it
            (all 0 at level 1, whose only parent is the root).
        numbers: `(B, k)` their candidate numbers.
        ancestors: `(B, k, levels * k)` bool; which rows forwarded so far, this frontier's included, each may see.
    """

    draft_ids: Tensor
    scores: Tensor
    parent_rows: Tensor
    numbers: Tensor
    ancestors: Tensor


@dataclass(frozen=True)
class TreeGrowth:
    """Candidates of a dynamic tree while it grows (EAGLE-2 §4.1; EAGLE-3 `topK_genrate`).

    Level 1 holds the root's best `k` tokens; each expansion adds the best `k` children of the `k` frontier nodes,
    `k * k` candidates, of which the best `k` become the next frontier. Candidates are numbered in that order from 0 and
    the root is -1, so parents precede children; scores are sums of log-probabilities, so they never rise along a path.
    Left out of the reference: its unused score threshold.

    Attributes:
        draft_ids, scores: one `(B, k)` or `(B, k * k)` tensor per level.
        expanded: candidate numbers of the nodes each level hangs below, `(B, 1)`, then `(B, k)`; each has `k` children.
        below: the frontier the last level hangs below; `None`: the root.
    """

    draft_ids: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    expanded: tuple[Tensor, ...]
    below: Frontier | None = None

    @classmethod
    def start(cls, logprobs: Tensor, top_k: int) -> TreeGrowth:
        """Level 1 from the drafter's log-probabilities after the root, `(B, Vd)` float32."""
        scores, draft_ids = logprobs.topk(top_k, dim=-1)  # (B, k)
        return cls((draft_ids,), (scores,), (torch.full_like(draft_ids[:, :1], -1),))

    @property
    def top_k(self) -> int:
        return self.draft_ids[0].shape[1]

    @property
    def num_candidates(self) -> int:
        """Candidates so far, root not counted."""
        return sum(level.shape[1] for level in self.draft_ids)

    def frontier(self) -> Frontier:
        """What to forward next: the best of the last level. Not made unless asked for: a last level has no next."""
        draft_ids, scores, below = self.draft_ids[-1], self.scores[-1], self.below
        batch, top_k = len(draft_ids), self.top_k
        if below is None:
            numbers = torch.arange(top_k, device=draft_ids.device).expand(batch, -1)
            own = torch.eye(top_k, dtype=torch.bool, device=draft_ids.device).expand(batch, -1, -1)
            return Frontier(draft_ids, scores, torch.zeros_like(draft_ids), numbers, own)
        best_scores, best = scores.topk(top_k, dim=1)  # (B, k)
        rows = best // top_k
        seen = below.ancestors.gather(1, rows[:, :, None].expand_as(below.ancestors))
        own = below.ancestors[:, :, -top_k:]  # an identity: a node sees itself, not its neighbours
        return Frontier(
            draft_ids=draft_ids.gather(1, best),
            scores=best_scores,
            parent_rows=rows,
            numbers=best + (self.num_candidates - draft_ids.shape[1]),
            ancestors=torch.cat([seen, own], dim=2),
        )

    def expand(self, parent: Frontier, logprobs: Tensor) -> TreeGrowth:
        """Add one level below this `frontier()` from its log-probabilities, `(B, k, Vd)` float32."""
        logp, children = logprobs.topk(self.top_k, dim=-1)  # (B, k, k)
        scores = (parent.scores[:, :, None] + logp).flatten(1)  # (B, k*k)
        draft_ids = children.flatten(1)
        expanded = (*self.expanded, parent.numbers)
        return TreeGrowth((*self.draft_ids, draft_ids), (*self.scores, scores), expanded, parent)

    def parents_of(self, candidates: Tensor) -> Tensor:
        """Candidate numbers of the parents of candidates `(B, n)`."""
        return torch.cat(self.expanded, dim=1).gather(1, candidates // self.top_k)

    def prune(self, root_tokens: Tensor, size: int, draft_to_target: Tensor | None = None) -> DraftTree:
        """Keep the root and the `size - 1` candidates of highest score, every one with its ancestors.

        Equal scores (a child the drafter is certain of scores what its parent does) are broken by candidate number:
        a parent has the smaller one, so it is always kept first.

        Args:
            root_tokens: `(B,)` last accepted token, target ids.
            size: nodes of the tree, root included.
            draft_to_target: `(Vd,)` target id of each draft id; `None` if the vocabularies are one.

        Raises:
            ConfigurationError: there are fewer candidates than `size` asks for.
        """
        if not 1 <= size <= self.num_candidates + 1:
            raise ConfigurationError(
                f"tree size is {size}, but {len(self.scores)} levels hold the root and {self.num_candidates} "
                f"candidates; wanted 1..{self.num_candidates + 1}: lower the size, or draft deeper or wider"
            )
        by_score = torch.cat(self.scores, dim=1).sort(dim=1, descending=True, stable=True).indices
        kept = by_score[:, : size - 1].sort(dim=1).values  # (B, N-1), ascending = topological

        draft_ids = torch.cat(self.draft_ids, dim=1).gather(1, kept)
        tokens = draft_ids if draft_to_target is None else draft_to_target[draft_ids]
        parents = self._renumber_parents(kept)
        ancestors = ancestors_from_parents(parents, len(self.scores))
        return DraftTree(
            tokens=torch.cat([root_tokens[:, None], tokens], dim=1),
            parents=parents,
            depths=ancestors.sum(2) - 1,
            ancestors=ancestors,
            max_depth=min(len(self.scores), size - 1),
            max_children=min(self.top_k, size - 1),
        )

    def _renumber_parents(self, kept: Tensor) -> Tensor:
        """Candidate numbers of the kept nodes' parents -> their places among the kept, root first. `(B, N)`."""
        # How many of them come up to the parent: none up to the root, which is place 0.
        return torch.nn.functional.pad(torch.searchsorted(kept, self.parents_of(kept), right=True), (1, 0))
