"""A drafter's matrices packed by bitsandbytes: int8, nf4 or fp4 in place of `nn.Linear`, on the fused network.

Attention, MLP and the draft head are packed, its own or the rows gathered from the target's: next to a 4-bit target
the head in bf16 costs more than the drafter's layer. `fc`, norms and embedding stay as they are.

The layers are our own, around bitsandbytes' operators. Its modules were made for training, and three habits of theirs
do harm here: `Linear4bit` repacks its weights for AVX512-BF16 when it first runs on such a CPU, rounding the scales to
bf16; it keeps the dtype it first computed in; `Linear8bitLt` treats an
input column in full precision as soon as one row of the batch has an outlier there, and waits for the device to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from ..checkpoints.eagle_network import KeepsBufferDtypes
from ..errors import ConfigurationError, shown
from ..memory.weights import Quantization, scheme

OLDEST_BITSANDBYTES = (0, 50)
"""From here on products of 4-bit weights with a few tokens are fused, whatever the device."""


def packing_of(quantization_config: Any) -> Quantization:
    """How a drafter's matrices are to be packed, from transformers' `BitsAndBytesConfig` or its dict.

    `bnb_4bit_compute_dtype` is not looked at, a drafter computes in its own dtype; nor is `llm_int8_threshold`, its
    inputs are all packed; nor what is about training or how packed numbers are held.

    Raises:
        ConfigurationError: another method.
    """
    config = quantization_config
    try:
        if isinstance(config, Mapping):
            config = BitsAndBytesConfig(**config)
        method = config.quantization_method()
    except (AttributeError, TypeError, ValueError):
        method = None
    if method is None:
        raise ConfigurationError(
            f"got quantization_config={shown(quantization_config)}; drafters are packed by bitsandbytes: pass "
            "BitsAndBytesConfig(load_in_8bit=True) or BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"
        )
    return scheme(config)


class PackedLinear(KeepsBufferDtypes):
    """`nn.Linear` whose weight is packed. Inputs `(..., K)`, outputs `(..., N)` in the input's dtype.

    Args:
        packing: how.
        shape: `(N, K)` of the matrix.
        tensors: what stands for it, by bitsandbytes' names: `absmax` and `scale` are a block's or a row's largest
            weight, the codes are the tables that packed numbers are looked up in.
        bias: `(N,)`, not packed.
    """

    def __init__(
        self, packing: Quantization, shape: tuple[int, int], tensors: Mapping[str, Tensor], bias: Tensor | None = None
    ):
        super().__init__()
        self.packing = packing
        self.out_features, self.in_features = shape
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        bitsandbytes()  # its operators are known to torch from here on

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        bitsandbytes()


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
        if self.packing.double_quant:
            scales = {"absmax": self.nested_absmax, "absmax_8bit": self.absmax}
            scales |= {"absmax_code": self.nested_code, "absmax_offset": self.offset}
        shape = (self.out_features, self.in_features)
        return torch.ops.bitsandbytes.gemm_4bit.default(
            x, self.weight, shape, blocksize=64, quant_type=_kind(self.packing), bias=self.bias, **scales
        )


def _kind(packing: Quantization) -> str:
    """`"int8"`, `"nf4"` or `"fp4"`."""
    return packing.method.removeprefix("bnb-")


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


@torch.no_grad()
def pack_matrix(weight: Tensor, packing: Quantization, bias: Tensor | None = None) -> PackedLinear:
    """Pack a matrix `(N, K)` where it lies."""
    shape = (weight.shape[0], weight.shape[1])
    if _kind(packing) == "int8":
        return Int8Linear(packing, shape, _int8_tensors(weight), bias)
    return FourBitLinear(packing, shape, _four_bit_tensors(weight, packing), bias)


def _int8_tensors(weight: Tensor) -> dict[str, Tensor]:
    rows = weight.float()
    scale = rows.abs().amax(dim=1)  # (N,)
    steps = 127 / scale.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros stays one
    return {"weight": (rows * steps[:, None]).round().to(torch.int8), "scale": scale}


def _four_bit_tensors(weight: Tensor, packing: Quantization) -> dict[str, Tensor]:
    packed, state = bitsandbytes().functional.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=packing.double_quant, quant_type=_kind(packing)
    )
    tensors = {"weight": packed, "absmax": state.absmax, "code": state.code}
    if packing.double_quant:
        tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code, "offset": state.offset}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}  # codes are shared between matrices


@torch.no_grad()
def pack_linears(
    network: Any, packing: Quantization, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """Replace those of a drafter's `nn.Linear`s by packed ones that would take more on `device` in `dtype`.

    Each matrix is taken there alone, so that the network never is as a whole.
    """
    element_bytes, shapes = (dtype or network.dtype).itemsize, network.packable()
    for name in [name for name, shape in shapes.items() if packing.packs(shape, element_bytes, name)]:
        linear = network.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.detach().to(device or linear.bias.device)
        packed = pack_matrix(linear.weight.detach().to(device or linear.weight.device), packing, bias)
        network.set_submodule(name, packed)


def packed_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Tensors of the packed matrices, by name; biases are not packed and not among them."""
    return {
        f"{name}.{part}": tensor
        for name, module in network.named_modules()
        if isinstance(module, PackedLinear)
        for part, tensor in module.named_buffers()
    }
