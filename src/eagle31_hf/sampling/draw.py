"""Drawing tokens from distributions. Pure and seeded; nothing waits for the device.

Random numbers come from `generator` (`None`: torch's global one), on the device of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def draw(weights: Tensor, generator: torch.Generator | None = None, *, numbers: Tensor | None = None) -> Tensor:
    """Draw one index per row, `weights (..., V)` -> `(...)` int64; weights are non-negative and need not sum to 1.

    Inverts the cumulative sum, in float64 so that rare tokens keep their exact share; an index of weight 0 is never
    drawn. On one CPU core, rows x 8192 weights: 17 us for 1 row and 78 us for 8, against 178 and 1344 us for
    `torch.multinomial`, which needs a random number per index instead of one per row.

    A row of zeros or NaN yields `V`, out of range on purpose: the next lookup fails instead of inventing a token.

    Args:
        numbers: what to draw with: `(..., 1)` of `uniform_numbers`, or `(..., V)` of `draw_numbers`, by which indices
            race for being drawn (two operations instead of five); default: new uniform ones.
    """
    if numbers is not None and numbers.shape[-1] > 1:
        return (numbers / weights).min(-1).indices  # x / 0 is infinite: never first
    if numbers is None:
        numbers = uniform_numbers((*weights.shape[:-1], 1), weights.device, generator)
    invert = _invert if weights.numel() < DRAWN_BY_BLOCKS else _invert_by_blocks
    return invert(weights, numbers).squeeze(-1)


DRAWN_BY_BLOCKS = 100_000
"""Weights from which on `draw` sums blocks first. On two CPU cores 24 rows of 8,192 take 0.1 ms instead of 5, one row
of 128,256 0.12 instead of 0.16, 24 of these 1.6 instead of 18; 6 rows of 8,192 would take twice as long."""

BLOCK = 64
"""Weights of a block."""


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Where the cumulative sum of `weights (..., V)` exceeds the share `numbers (..., 1)` of its end, `(..., 1)`."""
    cumulative = weights.cumsum(-1, dtype=_wide_dtype(weights.device))
    threshold = numbers * cumulative[..., -1:]  # < the end: the numbers are below 1
    return torch.searchsorted(cumulative, threshold, right=True)


def _invert_by_blocks(weights: Tensor, numbers: Tensor) -> Tensor:
    """`_invert`, which first finds the block and then the index in it: no running sum over all weights is written."""
    vocabulary = weights.shape[-1]
    if vocabulary % BLOCK:
        weights = F.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.unflatten(-1, (-1, BLOCK))  # (..., n, BLOCK)
    sums = blocks.sum(-1, dtype=_wide_dtype(weights.device))  # (..., n)
    ends = sums.cumsum(-1)
    threshold = numbers * ends[..., -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp(max=sums.shape[-1] - 1)  # (..., 1); zeros have none
    # How far into the block, as a share of it: below 1 again, whatever rounding does.
    share = 1 - (ends.gather(-1, block) - threshold) / sums.gather(-1, block)
    share = share.clamp(0, 1 - torch.finfo(share.dtype).eps / 2)
    chosen = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK)).squeeze(-2)  # (..., BLOCK)
    return (block * BLOCK + _invert(chosen, share)).clamp(max=vocabulary)


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest of each row, `(..., V)` -> `(...)`; of equal ones the first, as `argmax`."""
    return scores.max(-1).indices  # `argmax` takes two to three times as long on a CPU in bf16


def draw_without_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `k` different indices per row one after another, `probs (..., V)` -> `(..., k)` int64 in drawing order.

    An exponential race (the `k` smallest of `Exp(1) / p`; Gumbel top-k, arXiv 1903.06059): the same distribution as
    drawing, removing and renormalising `k` times. With fewer than `k` indices of positive probability the rest of the
    row is filled with indices of probability 0, which `accept_rejection` never accepts.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    # noise / p and not p / noise: 0 / 0 is NaN, which sorts as largest and so loses a race for the smallest.
    return (noise / probs).topk(k, dim=-1, largest=False, sorted=True).indices


def uniform_numbers(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Random numbers from 0 to below 1, in the precision draws are made in."""
    return torch.rand(shape, dtype=_wide_dtype(device), device=device, generator=generator)


def draw_numbers(
    draws: tuple[int, int], width: int | None, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Random numbers for `draws` `(B, K)` of one token each: `(B, K, width)` to race by, or `(B, K, 1)` uniform ones.

    Args:
        width: candidates of each draw, if they are few (top-k): an exponential number for each then costs little.
    """
    if width is None or width == 1:
        return uniform_numbers((*draws, 1), device, generator)
    return torch.empty((*draws, width), device=device).exponential_(generator=generator)


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple GPUs have no float64
