"""What torch promises nobody and running on any device cannot do without.

Graphs for a CPU need more (`compiled/ahead/torch_internals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source over its target, in one launch if all are of one precision and device."""
    torch._foreach_copy_(list(targets), list(sources))


def end_allocations(device: torch.device, pool: Any) -> None:
    """End what a failed capture into this memory pool leaves open; torch does so itself from 2.13 on.

    Raises:
        RuntimeError: nothing is open.
    """
    torch._C._cuda_endAllocateToPool(device.index or 0, pool)


def attention_and_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """CUDA's memory-efficient attention, which SDPA runs where there is a mask, and its log-sum-exp `(B, H, >= T)`."""
    out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
    return out, sums
