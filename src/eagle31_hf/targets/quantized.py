"""Targets whose weights are packed: rows of a packed LM head, and one token's numbers.

What loads and runs is transformers' business. Nothing here reads packed numbers: rows of a head are had by asking the
head itself, which works for every method there is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.shared_changes import CHANGES, ReplacedForward
from ..errors import IncompatibleTargetError

_UNITS = 64
"""Unit vectors given to a packed head at once: of 150,000 tokens their logits take 38 MB in fp32."""
_DENSE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# --- the head ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_head_rows(head: nn.Module, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Rows `rows` `(Vd,)` of an LM head as a dense `(Vd, H)` matrix: a reduced draft vocabulary over a shared head. The
    first ones are not copied.

    A packed weight's rows cannot be taken by index. Its head is given the unit vectors instead, a few at a time, and
    answers with its columns as it computes with them, in any way of packing.

    Args:
        width, dtype: of the hidden states that the head reads.
    """
    weight: Any = getattr(head, "weight", None)
    if type(head) is nn.Linear and weight.dtype in _DENSE and not hasattr(weight, "__tensor_flatten__"):
        rows, weight = rows.to(weight.device), weight.detach()
        are_first = torch.equal(rows, torch.arange(len(rows), device=rows.device))
        return weight[: len(rows)] if are_first else weight[rows]
    device = next(iter((*head.parameters(), *head.buffers()))).device
    rows = rows.to(device)
    has_bias = getattr(head, "bias", None) is not None
    bias = head(torch.zeros(1, width, dtype=dtype, device=device))[:, rows] if has_bias else 0
    slices = []
    for start in range(0, width, _UNITS):
        units = torch.zeros(min(_UNITS, width - start), width, dtype=dtype, device=device)  # (n, H)
        units.diagonal(offset=start).fill_(1)
        slices.append(head(units)[:, rows] - bias)  # (n, Vd)
    return torch.cat(slices).t().contiguous()


def require_working_head(head: nn.Module, target: str) -> None:
    """A head must be where it computes, and be what it is made for.

    Raises:
        IncompatibleTargetError: it is offloaded, by a `device_map` or by accelerate, and would be fetched for every
            draft step and every verification; or it was to be packed while its weight is the embedding's.
    """
    hook: Any = getattr(head, "_hf_hook", None)
    if getattr(hook, "offload", False) or any(tensor.is_meta for tensor in head.parameters()):
        raise IncompatibleTargetError(
            f"the LM head of {target} is offloaded (its device_map puts it on the CPU beside another device, or on "
            "disk) and would be fetched for every token; put the head on the device that computes, e.g. "
            "device_map={..., 'lm_head': 0}, and offload decoder layers instead"
        )
    if type(head).__name__ in ("Linear4bit", "Linear8bitLt") and type(getattr(head, "weight", None)) is nn.Parameter:
        raise IncompatibleTargetError(
            f"the LM head of {target} is a {type(head).__name__} whose weight is not packed, because it is also the "
            "embedding's: such a target cannot run. Name 'lm_head' in llm_int8_skip_modules, or leave that out"
        )


# --- LLM.int8 ---------------------------------------------------------------------------------------------------------


class OneTokenArithmetic:
    """Lets a forward over several tokens compute each as a forward of its own would.

    LLM.int8 takes an input column out of the int8 product, into full precision, as soon as one row has an outlier
    there. A token's numbers then depend on its neighbours, and a draft would not be verified by what the target
    computes token by token. While this is on, each row has the outliers that are its own.

    Args:
        model: the target; without int8 layers that look for outliers there is nothing to do.
    """

    def __init__(self, model: nn.Module):
        self._layers = [module for module in model.modules() if _looks_for_outliers(module)]
        self._threads: set[int] = set()  # that have it on; the others' forwards are as they were

    def __bool__(self) -> bool:
        return bool(self._layers)

    def start(self) -> None:
        """On for this thread, until `stop`."""
        if self._layers and threading.get_ident() not in self._threads:
            CHANGES.hold(("one token", id(self)), self._replace_forwards)
            self._threads.add(threading.get_ident())

    def stop(self) -> None:
        if threading.get_ident() in self._threads:
            self._threads.remove(threading.get_ident())
            CHANGES.let_go(("one token", id(self)))

    def _replace_forwards(self) -> Callable[[], None]:
        replaced = ExitStack()
        for layer in self._layers:
            name = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"  # behind accelerate's hooks
            before = vars(layer).get(name) or type(layer).forward.__get__(layer)
            replaced.callback(ReplacedForward(layer, functools.partial(self._forward, layer, before), name).undo)
        return replaced.close

    def _forward(self, layer: Any, before: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return _forward_row_by_row(layer, x) if threading.get_ident() in self._threads else before(x)

    @contextmanager
    def active(self) -> Iterator[None]:
        """On while open; left on if it was."""
        was_on = threading.get_ident() in self._threads
        self.start()
        try:
            yield
        finally:
            if not was_on:
                self.stop()


def _looks_for_outliers(module: nn.Module) -> bool:
    state: Any = getattr(module, "state", None)
    if type(module).__name__ != "Linear8bitLt" or state is None:
        return False
    return state.threshold > 0 and not state.has_fp16_weights


def _forward_row_by_row(layer: Any, x: Tensor) -> Tensor:
    """`Linear8bitLt.forward`, except that a row's outliers are its own. `x` `(..., K)`, result `(..., N)`."""
    rows = x.reshape(-1, x.shape[-1])  # (T, K)
    outliers = rows.to(torch.float16).abs() >= layer.state.threshold
    if rows.shape[0] == 1 or not bool(outliers.any()):
        return type(layer).forward(layer, x)
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    ops = torch.ops.bitsandbytes
    weight, scale = layer.state.CB, layer.state.SCB
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    packed, scales, _ = ops.int8_vectorwise_quant.default(rows.to(torch.float16).masked_fill(outliers, 0))
    out = ops.int8_scaled_mm.default(packed, weight, scales, scale, bias=bias, dtype=x.dtype)  # (T, N)
    columns = outliers.any(dim=0).nonzero().flatten()
    exact = rows.masked_fill(~outliers, 0)[:, columns]
    dense = ops.int8_vectorwise_dequant.default(weight[:, columns].contiguous(), scale).to(x.dtype)
    return out.addmm(exact, dense.t()).reshape(*x.shape[:-1], weight.shape[0])


def holds_packed_weights(model: nn.Module) -> bool:
    """Whether any matrix of `model` is held in another form than floats."""
    tensors = (*model.parameters(), *model.buffers())
    return any(t.ndim >= 2 and (t.dtype not in _DENSE or hasattr(t, "__tensor_flatten__")) for t in tensors)
