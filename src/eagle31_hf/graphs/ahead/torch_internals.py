"""What torch promises nobody and kept graphs cannot do without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_package(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """A package's code, which takes the tensors that it is given."""
    from torch._inductor import aoti_load_package  # slow to import

    loaded: Any = aoti_load_package(str(path))
    return lambda tensors: loaded.loader.boxed_run(tensors)


def write_package(exported: torch.export.ExportedProgram, path: Path) -> None:
    """Compile an exported program."""
    from torch._inductor import aoti_compile_and_package

    settings = {"size_asserts": False}  # packed tensors have no strides
    aoti_compile_and_package(exported, package_path=str(path), inductor_configs=settings)


def lower_packed_linear(linear: Any) -> None:
    """Let graphs that call this operator with packed weights call the product itself, without a way through Python;
    inductor's own lowering of it wants constants."""
    from torch._inductor import lowering, mkldnn_ir

    @lowering.register_lowering(linear, type_promotion_kind=None)
    def lowered(states: Any, packed: Any, bias: Any) -> Any:
        return lowering.TensorBox.create(mkldnn_ir.LinearUnary.create(states, packed, bias, "none", [], ""))


# --- oneDNN's products with packed weights ----------------------------------------------------------------------------


def multiply_packed(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`(..., K)` by weights `(N, K)` that `pack` has laid out, `(..., N)`."""
    return torch.ops.mkldnn._linear_pointwise.default(states, packed, bias, "none", [], "")


def pack(weight: Tensor, rows: int) -> Tensor:
    """`weight` `(N, K)` laid out for products of so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def layout_of(packed: Tensor) -> bytes:
    """How it is laid out."""
    return torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor multiply packed matrices of that precision."""
    try:
        return torch.backends.mkldnn.is_available() and bool(pack(torch.ones(2, 2, dtype=dtype), 1).numel())
    except RuntimeError:
        return False
