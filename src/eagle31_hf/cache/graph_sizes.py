"""The few sizes that graphs are made for.

A graph serves one shape only. Rows are padded to a few lengths (256 slots, then doubling), and what is padded is
masked. Where making a graph takes long, blocks are padded to a few node counts, too; a step that is captured in the
time of a few rounds has its exact width, since 4-bit products leave their fused kernels at 5 to 9 rows.
"""

from __future__ import annotations

from typing import NamedTuple

SLOT_BUCKET = 256
"""Smallest row length compiled for; longer ones double it, so a generation meets few of them."""

NODE_BUCKET = 8
"""Where graphs take long to make, verified nodes are padded to this or, beyond it, to the most a round may have,
rounded up to a multiple of this."""


class CacheSize(NamedTuple):
    """Arguments of `SpeculativeCache`."""

    capacity: int
    block: int
    slab: int | None


def slot_bucket(num_slots: int) -> int:
    """Row length to allocate where `num_slots` are needed."""
    return SLOT_BUCKET << max(0, (num_slots - 1) // SLOT_BUCKET).bit_length()


def node_bucket(num_nodes: int, most: int, *, exact: bool = False) -> int:
    """Nodes to verify where there are `num_nodes`, and never more than `most` in a round."""
    if exact:
        return num_nodes
    return NODE_BUCKET if num_nodes <= NODE_BUCKET else -(-most // NODE_BUCKET) * NODE_BUCKET


def cache_size(capacity: int, block: int, *, exact: bool = False) -> CacheSize:
    """A cache in which padded blocks of graphs have room, too. It grows by as much as rows get longer for graphs.

    Args:
        exact: the last time only as far as is needed; the longest rows are then of a size that few texts share.
    """
    needed = capacity + NODE_BUCKET
    longest = -(-needed // SLOT_BUCKET) * SLOT_BUCKET if exact else slot_bucket(needed)
    return CacheSize(longest, slot_bucket(block), SLOT_BUCKET)
