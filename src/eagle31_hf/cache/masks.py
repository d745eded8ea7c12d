"""Attention masks for a block of draft nodes behind a committed prefix.

A block has `M` nodes of which the last `T` are the queries of this forward; node `i` of row `b` has slot
`len_b + i` and position `len_b + depth_i`. Masks are float and additive (0 visible, `finfo.min` hidden): a boolean
mask is silently wrong under eager attention. Windows count positions, not slots: siblings share a position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .placement import Placement
from .spans import LayerKind, LayerKinds


def full_mask(slots: Tensor, num_slots: int, ancestors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Mask `(b, 1, T, num_slots)` of a full layer for the last `T` nodes of a block, which lie in `slots` `(b, T)`.

    Args:
        ancestors: which nodes of the block each one sees, bool `(1 or b, T, M)`; `None`: a chain, where each sees its
            slots up to its own.
    """
    columns = torch.arange(num_slots, device=slots.device)
    if ancestors is None:
        hidden = columns > slots[:, :, None]  # (b, T, S)
    else:
        num_queries, num_nodes = ancestors.shape[1:]
        node = columns - (slots[:, :1] + num_queries - num_nodes)  # (b, S), below 0 before the block
        held = node.clamp(0, num_nodes - 1)[:, None].expand(-1, num_queries, -1)  # (b, T, S)
        seen = ancestors.expand(len(slots), -1, -1).gather(2, held) & (node < num_nodes)[:, None]
        hidden = (node >= 0)[:, None] & ~seen
    mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def window_mask(
    kind: LayerKind, placement: Placement, depths: Tensor, visible: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Mask `(B, 1, T, ring + block slots)` of a windowed layer, over its ring slots and then the block.

    Args:
        depths: of every node of the block, `(1 or B, M)`; the last `T` are the queries.
        visible: block visibility, `(1 or B, T, M)` bool.
    """
    lengths = placement.lengths_tensor[: 1 if placement.rows_alike else None, None]
    positions = lengths + depths  # (b, M)
    queries = positions[:, positions.shape[1] - visible.shape[1] :, None]  # (b, T, 1)
    assert kind.ring is not None, "layers without a window have the full mask"
    slots = torch.arange(kind.ring, device=lengths.device)
    # The newest position < length that falls on the slot; negative while the ring is not yet full.
    held = lengths - 1 - (lengths - 1 - slots) % kind.ring  # (b, R)
    in_ring = kind.reaches(queries, held[:, None]) & (held >= 0)[:, None]  # (b, T, R)
    in_block = kind.reaches(queries, positions[:, None]) & visible  # (b, T, M)
    if unused := placement.block_slots - in_block.shape[2]:
        in_block = F.pad(in_block, (0, unused))
    batch_size = max(len(in_ring), len(in_block))
    hidden = ~torch.cat([part.expand(batch_size, -1, -1) for part in (in_ring, in_block)], dim=-1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    mask.masked_fill_(hidden, torch.finfo(dtype).min)
    return mask[:, None].expand(placement.batch_size, -1, -1, -1)


def block_masks(
    kinds: LayerKinds,
    placement: Placement,
    ancestors: Tensor | None,
    depths: Tensor | None,
    dtype: torch.dtype,
    *,
    none_is_causal: bool,
) -> Tensor | dict[str, Tensor | None] | None:
    """The masks of the placed block: of each kind of layer its own, and none where nothing is hidden.

    See `SpeculativeCache.attention_mask`.
    """
    num_queries, num_nodes, device = placement.num_tokens, placement.block_end, placement.device
    assert num_queries, "place() comes before attention_mask()"
    # One query, rows alike, nothing of the block hidden from it: there is nothing to mask in a full layer.
    open_ended = num_queries == 1 and placement.rows_alike and (ancestors is None or placement.after == 0)
    # The first chunk of all rows: kernels for causal attention skip half of it, and no mask has to be read.
    begins = none_is_causal and ancestors is None and placement.longest == placement.after == 0
    if (open_ended or begins) and not kinds.rings:
        return dict.fromkeys(kinds.by_mask) if kinds.types else None
    seen = None if ancestors is None else ancestors.to(device=device, dtype=torch.bool)
    rows = 1 if placement.rows_alike and (seen is None or len(seen) == 1) else None  # one mask for all, or each its own

    def mask_of(kind: LayerKind) -> Tensor | None:
        if kind.window is None:
            if open_ended or not kind.attends:
                return None
            mask = full_mask(placement.chain_slots[:rows], placement.visible_slots, seen, dtype)
            return mask.expand(placement.batch_size, -1, -1, -1)
        if seen is None:  # a chain: query `i` is node `M - T + i`, and sees every node up to itself
            nodes = torch.arange(num_nodes, device=device)[None]
            return window_mask(kind, placement, nodes, nodes[:, None] <= nodes[:, -num_queries:, None], dtype)
        assert depths is not None, "windows count positions, which a tree's depths tell"
        return window_mask(kind, placement, depths.to(device), seen, dtype)

    made = {kind: mask_of(kind) for kind in dict.fromkeys(kinds.by_mask.values())}
    if kinds.types is None:
        return next(iter(made.values()))
    return {name: made[kind] for name, kind in kinds.by_mask.items()}
