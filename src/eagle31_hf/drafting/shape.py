"""A draft's geometry: how deep, how wide, how many nodes, and what the caches must have room for because of it.

The one owner of these figures: the loop, the memory planner, the benchmark and compiled code all ask here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


def repeats_mask(queries: int, kv_heads: int, groups: int, width: int) -> bool:
    """Whether the mask of `queries` is repeated for each of the `groups` query heads that share keys and values.

    Writing it and reading it moves `2 * groups * queries` elements per slot. The other way is to read keys and values
    of `width` elements once for each head of a group: `2 * (groups - 1) * kv_heads * width` more.
    """
    return groups * queries < (groups - 1) * kv_heads * width


@dataclass(frozen=True)
class DraftShape:
    """What to draft in a round: `depth` levels of `top_k` children, `size` nodes with root; `top_k` 1 is a chain, ended
    early once the drafter is less sure of it than `min_confidence`. Depth 0 drafts nothing.

    A dynamic tree never has more nodes than its levels have candidates, whatever `size` it was asked for.
    """

    depth: int
    min_confidence: float = 0.0
    top_k: int = 1
    size: int = 0

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1

    @property
    def nodes(self) -> int:
        """Most nodes a verification forward has, root included."""
        if self.top_k == 1 or self.depth == 0:
            return self.depth + 1
        return min(self.size, 1 + num_candidates(self.depth, self.top_k))

    @property
    def draft_block(self) -> int:
        """Most positions the drafter writes in a round: what it drafts, or what it reads of an accepted path."""
        return max(1, self.depth * self.top_k, self.nodes)

    @property
    def stepped_levels(self) -> int:
        """Levels that have slots in a whole draft's graph: all of a chain, of a tree all but the last."""
        return self.depth - self.is_tree

    def target_cache(self, length: int, chunk: int) -> tuple[int, int]:
        """Slots per row of the target's cache for texts of up to `length` tokens, and most that it takes between two
        commits, prefill chunks of `chunk` tokens included."""
        return length + self.nodes, max(chunk, self.nodes)

    def drafter_cache(self, length: int, chunk: int) -> tuple[int, int]:
        """The same of the drafter's cache."""
        return length + self.nodes + self.draft_block, max(chunk, self.draft_block)

    def as_chain(self) -> DraftShape:
        """Its deepest path alone."""
        return replace(self, top_k=1, size=0) if self.is_tree else self

    def cut_to(self, depth: int) -> DraftShape:
        """This shape with no more than `depth` levels."""
        if depth >= self.depth:
            return self
        return DraftShape(depth=0) if depth < 1 else replace(self, depth=depth)


USUAL_TREE = DraftShape(5, top_k=2, size=8)
"""What graphs draft for one sampled text where nothing is set."""

LONGEST_CHAIN, LONGEST_OF_GRAPHS = 12, 7
"""The longest chains where nothing is set: ended by doubt, where asking costs nothing, or steered by a controller, and
by graphs, whose chain has the nodes of the tree."""
FIXED_DEPTH = 6
"""Of other drafts whose depth is not set, trees of a width that was asked for among them."""


def num_candidates(depth: int, top_k: int) -> int:
    """Candidates, root not counted, of a dynamic tree of so many levels (`drafter.dynamic`)."""
    return top_k + top_k**2 * (depth - 1)


# --- noise that sampled texts look ahead to ---------------------------------------------------------------------------

KEPT_BEHIND = 16
"""Positions behind each row's present one whose noise is kept: a drafter that paused is judged by so many."""


def ring_length(rows: int, count: int) -> int:
    """Positions of noise that are held for windows of so many."""
    return (KEPT_BEHIND + count) * (2 if rows == 1 else 1)


def noise_bytes(rows: int, vocabulary: int, count: int) -> int:
    """Bytes that `PositionNoise` holds for windows of so many positions."""
    return ring_length(rows, count) * rows * vocabulary * 4
