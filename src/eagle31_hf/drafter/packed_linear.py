"""A drafter's matrices packed by bitsandbytes: int8, nf4 or fp4 in place of `nn.Linear`, on the fused network.

Attention, MLP and the draft head are packed, its own or the rows gathered from the target's: next to a 4-bit target
the head in bf16 costs more than the drafter's layer. `fc`, norms and embedding stay as they are (`packable_shapes`).

The layers are our own, around bitsandbytes' operators. Its modules were made for training, and three habits of theirs
do harm here: `Linear4bit` repacks its weights for AVX512-BF16 when it first runs on such a CPU, rounding the scales to
bf16, so that what was loaded is not what is saved; it keeps the dtype it first computed in; `Linear8bitLt` treats an
input column in full precision as soon as one row of the batch has an outlier there, and waits for the device to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint, PackingScheme, packable_shapes
from ..errors import ConfigurationError

OLDEST_BITSANDBYTES = (0, 50)
"""From here on products of 4-bit weights with a few tokens are fused, whatever the device."""


class KeepsBufferDtypes(nn.Module):
    """Mixed in before a module class: `.to(dtype)` moves its buffers but leaves their dtypes alone."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class PackedLinear(KeepsBufferDtypes):
    """`nn.Linear` whose weight is packed. Inputs `(..., K)`, outputs `(..., N)` in the input's dtype.

    Args:
        scheme: how.
        shape: `(N, K)` of the matrix.
        tensors: what stands for it, by name, as `PackingScheme.tensor_infos` lists them.
        bias: `(N,)`, not packed.
    """

    def __init__(
        self, scheme: PackingScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], bias: Tensor | None = None
    ):
        super().__init__()
        self.scheme = scheme
        self.out_features, self.in_features = shape
        for name in scheme.tensor_infos(*shape):
            self.register_buffer(name, tensors[name])
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        bitsandbytes()  # its operators are known to torch from here on

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        bitsandbytes()

    def extra_repr(self) -> str:
        double = ", scales packed" if self.scheme.double_quant else ""
        return f"{self.in_features} to {self.out_features}, {self.scheme.method}{double}"


class Int8Linear(PackedLinear):
    """Weights in int8 with a scale per row; inputs are packed to int8 row by row for the product (arXiv 2208.07339).

    There are no outlier columns: a token's numbers depend on that token only, and nothing waits for the device.
    """

    weight: Tensor  # int8 (N, K)
    scale: Tensor  # fp32 (N,), the largest weight of each row

    def forward(self, x: Tensor) -> Tensor:
        ops, rows = torch.ops.bitsandbytes, x.reshape(-1, self.in_features).to(torch.float16)
        packed, scales, _ = ops.int8_vectorwise_quant.default(rows)  # (T, K) int8, (T,) fp32
        out = ops.int8_scaled_mm.default(packed, self.weight, scales, self.scale, dtype=x.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class FourBitLinear(PackedLinear):
    """Weights in nf4 or fp4, two to a byte, with a scale for each 64 (QLoRA, arXiv 2305.14314)."""

    weight: Tensor  # uint8 (N*K/2, 1)
    absmax: Tensor  # fp32 (N*K/64,), or uint8 where the scales are packed, too

    def forward(self, x: Tensor) -> Tensor:
        scales: dict[str, Any] = {"absmax": self.absmax}
        if self.scheme.double_quant:
            scales = {"absmax": self.nested_absmax, "absmax_8bit": self.absmax}
            scales |= {"absmax_code": self.nested_code, "absmax_offset": self.offset}
        shape = (self.out_features, self.in_features)
        return torch.ops.bitsandbytes.gemm_4bit.default(
            x, self.weight, shape, blocksize=64, quant_type=self.scheme.method, bias=self.bias, **scales
        )


def bitsandbytes() -> Any:
    """The package, which is optional.

    Raises:
        ConfigurationError: it is not installed, or too old.
    """
    try:
        package = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigurationError(
            f"packing weights needs bitsandbytes, which cannot be imported ({error}): pip install 'bitsandbytes>=0.50'"
        ) from error
    version = tuple(int(part) for part in str(package.__version__).split(".")[:2])
    if version < OLDEST_BITSANDBYTES:
        raise ConfigurationError(
            f"packing weights needs bitsandbytes 0.50 or later, installed is {package.__version__}; "
            "pip install --upgrade bitsandbytes"
        )
    return package


# --- packing ----------------------------------------------------------------------------------------------------------


def packed_linear(
    scheme: PackingScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], bias: Tensor | None = None
) -> PackedLinear:
    """The layer around tensors packed before."""
    kind = Int8Linear if scheme.method == "int8" else FourBitLinear
    return kind(scheme, shape, tensors, bias)


@torch.no_grad()
def pack_matrix(weight: Tensor, scheme: PackingScheme, bias: Tensor | None = None) -> PackedLinear:
    """Pack a matrix `(N, K)` where it lies."""
    shape = (weight.shape[0], weight.shape[1])
    tensors = _int8_tensors(weight) if scheme.method == "int8" else _four_bit_tensors(weight, scheme)
    return packed_linear(scheme, shape, tensors, bias)


def _int8_tensors(weight: Tensor) -> dict[str, Tensor]:
    rows = weight.float()
    scale = rows.abs().amax(dim=1)  # (N,)
    steps = 127 / scale.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros stays one
    return {"weight": (rows * steps[:, None]).round().to(torch.int8), "scale": scale}


def _four_bit_tensors(weight: Tensor, scheme: PackingScheme) -> dict[str, Tensor]:
    packed, state = bitsandbytes().functional.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=scheme.double_quant, quant_type=scheme.method
    )
    tensors = {"weight": packed, "absmax": state.absmax, "code": state.code}
    if scheme.double_quant:
        tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code, "offset": state.offset}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}  # codes are shared between matrices


@torch.no_grad()
def pack_linears(
    network: Any, scheme: PackingScheme, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """Replace those of a drafter's `nn.Linear`s by packed ones that would take more on `device` in `dtype`.

    Each matrix is taken there alone, so that the network never is as a whole.
    """
    element_bytes, shapes = (dtype or network.dtype).itemsize, packable_shapes(network.config)
    for name in [name for name, shape in shapes.items() if scheme.packs(name, shape, element_bytes)]:
        linear = network.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.detach().to(device or linear.bias.device)
        packed = pack_matrix(linear.weight.detach().to(device or linear.weight.device), scheme, bias)
        network.set_submodule(name, packed)


def put_packed(network: nn.Module, checkpoint: Checkpoint) -> None:
    """Put layers around the matrices that `checkpoint` holds packed; `network` may be on meta."""
    assert checkpoint.scheme is not None
    for name, shape in packable_shapes(checkpoint.config).items():
        names = {part: f"{name}.{part}" for part in checkpoint.scheme.tensor_infos(*shape)}
        tensors = {part: checkpoint.packed[full] for part, full in names.items() if full in checkpoint.packed}
        if tensors:
            bias = getattr(network.get_submodule(name), "bias", None)  # on meta: it comes with the rest
            network.set_submodule(name, packed_linear(checkpoint.scheme, shape, tensors, bias))


def packed_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Tensors of the packed matrices, by name; biases are not packed and not among them."""
    return {
        f"{name}.{part}": tensor
        for name, module in network.named_modules()
        if isinstance(module, PackedLinear)
        for part, tensor in module.named_buffers()
    }
