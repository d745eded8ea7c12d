"""Attention with the keys shared out among the multiprocessors of a card (flash-decoding).

CUDA's kernel that takes masks has one block for 64 queries of a head, which goes through all keys. A draft is few
queries and a context is many keys, so most of a card would stand idle. Parts of the keys are attended to as rows of a
batch, and what they give is weighted by how much of the softmax lies in each. Keys are viewed, not copied.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import first_line
from .torch_internals import attention_and_sums

logger = logging.getLogger(__name__)

SHORTEST_SPLIT = 2048
"""Fewest keys that are shared out. Estimated, not measured: putting parts together is four launches of some 2 us, about
what one multiprocessor takes to read so many keys and values of 128 elements in 16 bits."""

BLOCK_QUERIES, BLOCK_KEYS = 64, 128
"""What a block of the kernel takes at a time."""

MASK_ALIGNMENT = 16
"""Slots that CUDA's kernels want a mask's rows to be a multiple of."""

LARGEST_DIFFERENCE = 0.05
"""Of results whose elements are about 1, in 16 bits: a wrong weight of a part is off by more."""


@lru_cache
def is_right_on(device: torch.device) -> bool:
    """Whether a CUDA device gives with keys shared out what it gives without, found out once: what the kernel returns
    is no promise of torch's."""
    try:
        error = _difference_on(device)
    except RuntimeError as failure:
        why = first_line(failure)
    else:
        if error < LARGEST_DIFFERENCE:
            return True
        why = f"its result differs by {error:.2g}"
    logger.warning("eagle31: keys are not shared out among the multiprocessors of %s: %s", device, why)
    return False


def _difference_on(device: torch.device) -> float:
    """Between attention in parts, one of them hidden as a whole, and in one piece, on random numbers."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, length, 64, generator=made).to(device, torch.float16) for length in (8, 640, 640)
    )
    query *= 4  # so that parts weigh differently
    mask = torch.zeros(1, 1, 8, 640, dtype=torch.float16, device=device)
    mask[..., 480:] = torch.finfo(torch.float16).min
    parts = attention_in_parts(query, key, value, finite(mask, torch.float16), 4)
    return (parts - F.scaled_dot_product_attention(query, key, value, attn_mask=mask)).abs().max().item()


def useful_parts(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Among how many parts `key` `(B, H, S, D)` should be shared out; 1 where a card is busy anyway, and off CUDA."""
    batch, heads, length, width = query.shape
    if not query.is_cuda or key.shape[2] < SHORTEST_SPLIT or torch.version.hip is not None:
        return 1
    differentiated = torch.is_grad_enabled() and query.requires_grad  # weights of parts have no derivative
    if differentiated or width % 8 or value.shape[3] % 8 or not all(map(_rows_lie_as_heads, (key, value))):
        return 1
    if not is_right_on(query.device):
        return 1
    blocks = batch * heads * -(-length // BLOCK_QUERIES)
    return max(1, min(_multiprocessors(query.device) // blocks, key.shape[2] // BLOCK_KEYS))


def _rows_lie_as_heads(states: Tensor) -> bool:
    return len(states) == 1 or states.stride(0) == states.shape[1] * states.stride(1)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def finite(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask`, additive, with what is hidden still finite after the kernel has multiplied it by log2(e).

    A whole part may be hidden from a query, whose result would else be NaN.
    """
    least = torch.finfo(dtype).min / 4
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, least)
    return mask.clamp(min=least)


def attention_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parts: int, *, scale: float | None = None
) -> Tensor:
    """SDPA of `query` `(B, H, T, D)` over `key` and `value` `(B, H, S, D)`, shared out among `parts`.

    What is left of the keys behind equal parts is one part more.

    Args:
        mask: `(1 or B, 1 or H, T, S)` as `finite` makes it, or `None`.
    """
    batch, heads, length, _ = query.shape
    slots = key.shape[2]
    size = slots // parts // MASK_ALIGNMENT * MASK_ALIGNMENT
    rows = [states.flatten(0, 1) for states in (query, key, value)]  # (B*H, ...)
    if mask is not None:
        mask = mask.expand(batch, heads, -1, -1).flatten(0, 1) if batch > 1 else mask[0].expand(heads, -1, -1)
    found = [_attend(rows, mask, (0, parts * size), size, scale)]
    if slots > parts * size:
        found.append(_attend(rows, mask, (parts * size, slots), slots - parts * size, scale))
    outs, sums = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*found, strict=True))
    shares = torch.softmax(sums, dim=0)[..., None]  # (parts, B*H, T, 1)
    return (outs * shares).sum(0).to(query.dtype).view(batch, heads, length, -1)


def _attend(
    rows: list[Tensor], mask: Tensor | None, span: tuple[int, int], size: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Of the keys of a span, in parts of `size`: what each gives, `(parts, B*H, T, D)`, and its log-sum-exp."""
    query, *states = rows
    key, value = (
        each[:, slice(*span)].unflatten(1, (-1, size)).transpose(0, 1) for each in states
    )  # (parts, B*H, size, D)
    if mask is not None:
        mask = mask[..., slice(*span)].unflatten(2, (-1, size)).permute(2, 0, 1, 3)  # (parts, B*H, T, size)
    out, sums = attention_and_sums(query.expand(len(key), -1, -1, -1), key, value, mask, scale)
    return out, sums[..., : query.shape[1]]  # padded to the kernel's 32
