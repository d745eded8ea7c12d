"""Names of torch that are not public and without which no device can be used.

Graphs for a CPU need more (`graphs/ahead/torch_internals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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


def hooks_on_all_modules() -> list[Callable[..., Any]]:
    """Those that run before and after the forward of every module of the process."""
    return [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]


def open_modes() -> list[Any]:
    """Modes of this thread, which see every function or operation that is called."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
