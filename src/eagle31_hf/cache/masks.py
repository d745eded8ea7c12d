"""Attention masks for a block of draft nodes behind a committed prefix.

A block has `M` nodes of which the last `T` are the queries of this forward; node `i` of row `b` has slot
`len_b + i` and position `len_b + depth_i`. Masks are float and additive (0 visible, `finfo.min` hidden): a boolean
mask is silently wrong under eager attention. Windows count positions, not slots: siblings share a position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafting.shape import RESIDENT_QUERIES
from .placement import Placement
from .spans import AttentionSpan, LayerSpans


def ragged_mask(lengths: Tensor, visible: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
    """Mask of a full layer when rows have different lengths. Work grows with `num_slots`.

    Args:
        lengths: committed tokens per row, `(B,)`.
        visible: block visibility, `(1 or B, T, M)` bool.
        num_slots: `max(lengths) + M`.

    Returns:
        Tensor: `(B, 1, T, num_slots)`.
    """
    (batch_size,), (_, num_queries, num_nodes) = lengths.shape, visible.shape
    hidden_value = torch.finfo(dtype).min
    slots = torch.arange(num_slots, device=lengths.device)
    prefix = torch.zeros(batch_size, 1, num_slots, dtype=dtype, device=lengths.device)
    prefix.masked_fill_(slots >= lengths[:, None, None], hidden_value)
    mask = prefix.repeat(1, num_queries, 1)  # (B, T, slots)
    block = torch.zeros(visible.shape, dtype=dtype, device=lengths.device).masked_fill_(~visible, hidden_value)
    node_slots = lengths[:, None, None] + slots[:num_nodes]  # (B, 1, M)
    shape = (batch_size, num_queries, num_nodes)
    return mask.scatter_(2, node_slots.expand(shape), block.expand(shape))[:, None]


def window_mask(
    span: AttentionSpan, lengths: Tensor, depths: Tensor, visible: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Mask of a windowed layer, over its ring slots and then the block.

    Args:
        lengths: committed tokens, `(B,)`, or `(1,)` when all rows are alike.
        depths: depth of every node of the block, `(1 or B, M)`; the last `T` are the queries.
        visible: block visibility, `(1 or B, T, M)` bool.

    Returns:
        Tensor: `(1 or B, 1, T, ring + M)`.
    """
    num_queries = visible.shape[1]
    positions = lengths[:, None] + depths  # (b, M)
    queries = positions[:, positions.shape[1] - num_queries :, None]  # (b, T, 1)
    last = lengths[:, None] - 1
    slots = torch.arange(span.ring, device=lengths.device)
    # The newest position <= last that falls on the slot; negative while the ring is not yet full.
    held = last - (last - slots) % span.ring  # (b, R)
    in_ring = span.reaches(queries, held[:, None]) & (held >= 0)[:, None]  # (b, T, R)
    in_block = span.reaches(queries, positions[:, None]) & visible  # (b, T, M)
    batch_size = max(len(in_ring), len(in_block))
    hidden = ~torch.cat([part.expand(batch_size, -1, -1) for part in (in_ring, in_block)], dim=-1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


class ResidentMask:
    """Mask of the full layers, kept between rounds while all rows have one length.

    Prefix columns are visible to every query and stay so; only block columns change. A round therefore writes `T * M`
    block cells and clears the columns that became prefix since the last round, however long the context is.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # (1, 1, queries, slots)
        self._clean = 0  # columns below are visible to every query; columns above may hold old blocks

    def build(self, length: int, visible: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
        """Mask `(1, 1, T, length + M)` for one block visibility `(1, T, M)`; `num_slots`: how far slots may go for now.

        Valid until the next call: it is a view of the resident buffer.
        """
        _, num_queries, num_nodes = visible.shape
        end = length + num_nodes
        if num_queries > RESIDENT_QUERIES:
            mask = torch.zeros(1, 1, num_queries, end, dtype=dtype, device=visible.device)
        else:
            buffer = self._reserve(num_queries, num_slots, dtype, visible.device)
            if self._clean < length:
                buffer[..., self._clean : length].zero_()
            self._clean = length
            mask = buffer[:, :, :num_queries, :end]
        mask[..., length:].fill_(torch.finfo(dtype).min).masked_fill_(visible, 0)
        return mask

    def _reserve(self, num_queries: int, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        old = self._buffer
        if old is None or (old.dtype, old.device) != (dtype, device) or old.shape[2] < num_queries:
            queries = 1 << (num_queries - 1).bit_length()  # trees vary in size: room for the next ones
        elif old.shape[3] < num_slots:
            queries = old.shape[2]
        else:
            return old
        self._buffer = torch.zeros(1, 1, queries, num_slots, dtype=dtype, device=device)
        self._clean = 0
        return self._buffer

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes


def block_visibility(
    ancestors: Tensor | None, num_queries: int, num_nodes: int, device: torch.device
) -> Tensor:  # fmt: skip
    """Normalise `ancestors` (`None`, `(T, M)` or `(B, T, M)`) to `(1 or B, T, M)` bool on `device`.

    `None` is a chain: query `i` is node `M - T + i` and sees every node up to itself.
    """
    if ancestors is None:
        return torch.ones(1, num_queries, num_nodes, dtype=torch.bool, device=device).tril_(num_nodes - num_queries)
    ancestors = ancestors.to(device=device, dtype=torch.bool)
    return ancestors[None] if ancestors.dim() == 2 else ancestors


class BlockMasks:
    """The masks of the placed block: of each kind of layer its own, and none where nothing is hidden.

    Args:
        spans: how far back each layer sees.
        placement: rows and block; read whenever a mask is wanted.
    """

    def __init__(self, spans: LayerSpans, placement: Placement):
        self.spans, self.placement = spans, placement
        self.resident = ResidentMask()

    def build(
        self,
        ancestors: Tensor | None,
        depths: Tensor | None,
        dtype: torch.dtype,
        *,
        none_is_causal: bool = False,
    ) -> Tensor | dict[str, Tensor | None] | None:
        """See `SpeculativeCache.attention_mask`."""
        placement = self.placement
        assert placement.num_tokens, "place() comes before attention_mask()"
        spans = self.spans.by_mask
        # One query, rows alike, nothing of the block hidden from it: there is nothing to mask in a full layer.
        open_ended = placement.num_tokens == 1 and placement.rows_alike and (ancestors is None or placement.after == 0)
        # The first chunk of all rows: kernels for causal attention skip half of it, and no mask has to be read.
        begins = none_is_causal and ancestors is None and placement.longest == placement.after == 0
        if (open_ended or begins) and all(span.window is None for span in spans.values()):
            return dict.fromkeys(spans) if self.spans.types else None
        visible = block_visibility(ancestors, placement.num_tokens, placement.block_end, placement.device)
        made: dict[AttentionSpan, Tensor | None] = {}
        for span in dict.fromkeys(spans.values()):
            if span.attends and span.window is not None:
                made[span] = self._of_window(span, visible, self._depths(visible, ancestors, depths), dtype)
            else:
                made[span] = self._of_all(visible, dtype) if span.attends and not open_ended else None
        if self.spans.types is None:
            return next(iter(made.values()))
        return {kind: made[span] for kind, span in spans.items()}

    def _of_all(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        placement = self.placement
        if placement.rows_alike and len(visible) == 1:
            return self.resident.build(placement.longest, visible, placement.reserved_slots, dtype)
        return ragged_mask(placement.lengths_tensor, visible, placement.visible_slots, dtype)

    def _depths(self, visible: Tensor, ancestors: Tensor | None, depths: Tensor | None) -> Tensor:
        """Of every node of the block, `(1 or B, M)`."""
        if depths is None and ancestors is None:
            depths = torch.arange(visible.shape[2], device=self.placement.device)
        elif depths is None:
            assert visible.shape[1] == visible.shape[2], "depths of earlier nodes are not in a part of the block"
            depths = visible.sum(-1) - 1
        depths = depths.to(self.placement.device)
        return depths[None] if depths.dim() == 1 else depths

    def _of_window(self, span: AttentionSpan, visible: Tensor, depths: Tensor, dtype: torch.dtype) -> Tensor:
        placement = self.placement
        lengths = placement.lengths_tensor[:1] if placement.rows_alike else placement.lengths_tensor
        return window_mask(span, lengths, depths, visible, dtype)
