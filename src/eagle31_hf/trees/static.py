"""Tree shapes fixed before anything is drafted, from a list of child-rank paths or from measured acceptance."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .draft_tree import DraftTree, Proposal, ancestors_from_parents


@dataclass(frozen=True)
class TopologyLevel:
    """Nodes of one depth, in node order. Child `ranks[i]` of row `parent_rows[i]` of the level above is node `i`.

    Attributes:
        nodes: their numbers, contiguous because a topology is numbered level by level.
        parent_rows: parent as a position within the level above.
        ranks: which child of its parent; 0 is the drafter's first choice (or first draw).
    """

    nodes: range
    parent_rows: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StaticTopology:
    """One tree shape for every round, numbered level by level, siblings by rank (Medusa §2.3; EAGLE-1 `choices`).

    The shape may not depend on the tokens drawn, which is what makes it the tree for *sampled* children: pruning
    sampled children by their probability would change the distribution they were drawn from, and with it the output.

    Attributes:
        paths: one child-rank path per node, root `()` first: `(0, 2)` is the third child of the first child.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> StaticTopology:
        """Topology of the given child-rank paths; the root `()` may be left out, the order does not matter.

        Raises:
            ConfigurationError: a path occurs twice, has a negative rank, or lacks its parent or an elder sibling.
        """
        listed = [tuple(path) for path in paths if len(path)]
        known = set(listed)
        if len(known) != len(listed):
            raise ConfigurationError(f"tree paths {listed} name a node twice; wanted each path once")
        for path in listed:
            if path[-1] < 0:
                raise ConfigurationError(f"tree path {path} has a negative child rank; ranks count from 0")
            elder = (*path[:-1], path[-1] - 1)
            missing = [p for p in (path[:-1], elder) if p and p[-1] >= 0 and p not in known]
            if missing:
                raise ConfigurationError(
                    f"tree path {path} needs {missing} too: a node needs its parent and, because children are "
                    "accepted in the order they were drawn, every sibling of a smaller rank; add them"
                )
        return cls(((), *sorted(known, key=lambda path: (len(path), path))))

    @classmethod
    def best_for(cls, rank_acceptance: Sequence[float], *, depth: int, size: int) -> StaticTopology:
        """The `size` nodes most likely to be accepted (Medusa §2.3.3, Sequoia §3.1), best first.

        Args:
            rank_acceptance: measured chance that the child of each rank is the one accepted; its length is the
                widest a node may get.
            depth: longest path, root not counted.
            size: nodes, root included; fewer if `depth` and width allow no more.

        Raises:
            ConfigurationError: no ranks, a chance outside 0..1, or `depth` or `size` below 1.
        """
        if not rank_acceptance or not all(0.0 <= chance <= 1.0 for chance in rank_acceptance):
            raise ConfigurationError(f"rank_acceptance is {list(rank_acceptance)}; wanted at least one chance in 0..1")
        if depth < 1 or size < 1:
            raise ConfigurationError(f"depth={depth}, size={size}; wanted both at least 1")
        paths: list[tuple[int, ...]] = []
        waiting: list[tuple[float, tuple[int, ...]]] = [(-rank_acceptance[0], (0,))]
        while waiting and len(paths) < size - 1:
            cost, path = heapq.heappop(waiting)
            paths.append(path)
            rank = path[-1]
            if len(path) < depth:
                heapq.heappush(waiting, (cost * rank_acceptance[0], (*path, 0)))
            if rank + 1 < len(rank_acceptance):
                parent_cost = -math.prod([rank_acceptance[r] for r in path[:-1]], start=1.0)
                heapq.heappush(waiting, (parent_cost * rank_acceptance[rank + 1], (*path[:-1], rank + 1)))
        return cls.from_paths(paths)

    @property
    def size(self) -> int:
        """Nodes, root included."""
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def max_children(self) -> int:
        return max((path[-1] + 1 for path in self.paths[1:]), default=0)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node; the root is its own."""
        number = {path: node for node, path in enumerate(self.paths)}
        return tuple(number[path[:-1]] for path in self.paths)

    @cached_property
    def levels(self) -> tuple[TopologyLevel, ...]:
        """Depths 1..D: what the drafting loop needs to turn a level's top-k children into the next level."""
        levels, above = [], range(0, 1)
        for depth in range(1, self.max_depth + 1):
            stop = next((i for i, p in enumerate(self.paths) if len(p) > depth), self.size)
            nodes = range(above.stop, stop)
            parent_rows = tuple(self.parents[node] - above.start for node in nodes)
            levels.append(TopologyLevel(nodes, parent_rows, tuple(self.paths[node][-1] for node in nodes)))
            above = nodes
        return tuple(levels)

    def tree(self, tokens: Tensor, proposal: Proposal | None = None) -> DraftTree:
        """This shape filled with `tokens (B, N)`, target ids in node order."""
        batch = tokens.shape[0]
        parents, depths, ancestors = _topology_tensors(self, tokens.device)
        return DraftTree(
            tokens=tokens,
            parents=parents.expand(batch, -1),
            depths=depths.expand(batch, -1),
            ancestors=ancestors.expand(batch, -1, -1),
            max_depth=self.max_depth,
            max_children=self.max_children,
            proposal=proposal,
        )


@lru_cache(maxsize=64)
def _topology_tensors(topology: StaticTopology, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):
        parents = torch.tensor([topology.parents], device=device)
        depths = torch.tensor([[len(path) for path in topology.paths]], device=device)
        return parents, depths, ancestors_from_parents(parents, topology.max_depth)
