"""Bytes of a model's weights: walked over the storages of a loaded one, or counted from shapes alone.

Shapes come from the model class itself, built on the meta device (no memory, no weights), so every architecture
transformers knows is counted exactly. Tied tensors count once. What each way of packing costs is exact for what
transformers loads: the tests compare it with the storages of models really loaded. `n = N*K` for a matrix of `N` rows
(outputs) and `K` columns (inputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..errors import MemoryPlanError, first_line, removal

# --- how they are stored ----------------------------------------------------------------------------------------------

BLOCK = 64
"""Weights with a scale of their own, where bitsandbytes packs in 4 bits."""
_NESTED_BLOCK = 256  # scales with a scale of their own, under double quantisation
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_OF_4_BITS = "n/2 + 4n/64 + 64 (scales packed: n/2 + n/64 + 4n/16384 + 1092)"
FORMULAS = {
    "none": "n*dtype",
    "bnb-int8": "n + 4N",
    "bnb-nf4": _OF_4_BITS,
    "bnb-fp4": _OF_4_BITS,
}
"""By method, what a matrix takes: as `Quantization.matrix_bytes` computes it, for the ledger. Weights packed in another
way take what their files do."""


@dataclass(frozen=True)
class Quantization:
    """How a target's weights are stored.

    Attributes:
        method: key of `FORMULAS`, or what transformers calls another way to pack.
        dtype: of everything left unpacked, and of features and caches: `"bf16"`, `"fp16"` or `"fp32"`.
        double_quant: bitsandbytes packs the scales too.
        skip_modules: names left unpacked; `None` means what transformers leaves by default.
    """

    method: str
    dtype: str = "bf16"
    double_quant: bool = False
    skip_modules: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """As in `SCHEMES`."""
        if self.is_as_stored:
            return "as stored"
        if self.method == "none":
            return self.dtype
        return f"{self.method}{'-dq' if self.double_quant else ''}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def dtype_bytes(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def is_as_stored(self) -> bool:
        """Whether weights take what their files do: there is no formula."""
        return self.method not in FORMULAS

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix with its scales and tables; a bias is not packed and not counted here."""
        elements = rows * columns
        if self.method == "bnb-int8":
            return elements + 4 * rows
        if not self.method.startswith("bnb-"):
            return elements * self.dtype_bytes
        blocks = math.ceil(elements / BLOCK)
        packed = math.ceil(elements / 2) + 4 * 16
        if not self.double_quant:
            return packed + 4 * blocks
        return packed + blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) + 4 * 256 + 4

    def packs(self, shape: tuple[int, int], element_bytes: int, name: str = "") -> bool:
        """Whether a drafter's matrix `(N, K)` is packed: none that is skipped by its name, or would become larger.

        In 4 bits a row must be whole blocks. Where a block reaches into the next row, bitsandbytes has no fused kernel,
        and its kernel for CPUs takes the wrong scales without a word (0.50.2, rows of 16, 32, 48, 96, ... weights).
        """
        skipped = any(name == key or name.endswith(f".{key}") for key in self.skip_modules or ())
        aligned = self.method == "bnb-int8" or shape[1] % BLOCK == 0
        return not skipped and aligned and self.matrix_bytes(*shape) < math.prod(shape) * element_bytes

    def workspace_bytes(self, rows: int, columns: int, tokens: int) -> int:
        """Bytes a matrix product with `tokens` inputs takes beyond input and output."""
        if self.method == "none":
            return 0
        if self.method == "bnb-int8":
            return tokens * (columns + 4 * rows)  # int8 inputs, int32 products
        if self.method.startswith("bnb-") and tokens <= 4:
            return 0  # bitsandbytes >= 0.50 always fuses so many; beyond, each card has its own table and may unpack
        return rows * columns * self.dtype_bytes


SCHEMES: dict[str, Quantization] = {
    "bf16": Quantization("none", "bf16"),
    "fp16": Quantization("none", "fp16"),
    "fp32": Quantization("none", "fp32"),
    "bnb-int8": Quantization("bnb-int8"),
    "bnb-nf4": Quantization("bnb-nf4"),
    "bnb-nf4-dq": Quantization("bnb-nf4", double_quant=True),
    "bnb-fp4": Quantization("bnb-fp4"),
    "bnb-fp4-dq": Quantization("bnb-fp4", double_quant=True),
}
_OTHER_NAMES = {"4bit": "bnb-nf4-dq", "8bit": "bnb-int8",
                "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "bnb-int8", "nf4": "bnb-nf4",
                "nf4-dq": "bnb-nf4-dq", "fp4": "bnb-fp4"}  # fmt: skip


def scheme(quantization: str | dict[str, Any] | Quantization | Any, dtype: str = "bf16") -> Quantization:
    """A scheme by name (`SCHEMES`), or from a `quantization_config` (dict or transformers object).

    Args:
        dtype: of what stays unpacked, where the scheme leaves it open.

    Raises:
        MemoryPlanError: a name that is not known, or a configuration that cannot be read; the known names are listed.
    """
    if isinstance(quantization, Quantization):
        return quantization
    if isinstance(quantization, str):
        name = _OTHER_NAMES.get(quantization.lower(), quantization.lower())
        if name not in SCHEMES:
            known = f"got quantization {quantization!r}; known: 4bit, 8bit, {', '.join(SCHEMES)}"
            raise MemoryPlanError(removal(f"quantization {name}") or known)
        found = SCHEMES[name]
        return found if found.method == "none" else replace(found, dtype=dtype)
    try:
        fields = quantization if isinstance(quantization, dict) else vars(quantization)
        method = str(getattr(fields["quant_method"], "value", fields["quant_method"]))
        if method != "bitsandbytes":
            return Quantization(method, dtype)
        skip = fields.get("modules_to_not_convert") or fields.get("llm_int8_skip_modules")
        return replace(_of_bitsandbytes(fields), dtype=dtype, skip_modules=tuple(skip) if skip else None)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise MemoryPlanError(
            f"got quantization_config {str(quantization)[:160]!r}, which cannot be read ({first_line(error)}); name "
            f"one of {', '.join(SCHEMES)} instead"
        ) from error


def _of_bitsandbytes(fields: dict[str, Any]) -> Quantization:
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        return SCHEMES["bnb-int8"]
    kind = SCHEMES[f"bnb-{fields.get('bnb_4bit_quant_type', 'fp4')}"]
    return replace(kind, double_quant=bool(fields.get("bnb_4bit_use_double_quant")))


# --- what a model has -------------------------------------------------------------------------------------------------

_PACKED_STATES = ("QuantState", "MatmulLtState")
"""What bitsandbytes hangs on a parameter or a module, outside parameters() and buffers(); double quantisation nests one
in another."""


def storage_bytes(model: nn.Module) -> int:
    """Bytes of every distinct storage behind a loaded model, scales and code tables of quantised weights included.

    `get_memory_footprint()` misses those, and reports the logical size of tensor subclasses.
    """
    states = (getattr(module, "state", None) for module in model.modules())
    storages = (tensor.untyped_storage() for tensor in _tensors_of((*model.parameters(), *model.buffers(), *states)))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, those hung on them, and what a tensor subclass (torchao, quanto) is made of."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from _tensors_of(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value
        if isinstance(value, Tensor) or type(value).__name__ in _PACKED_STATES:
            yield from _tensors_of(vars(value).values())


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights under one quantisation.

    Attributes:
        packed: of matrices the method packs, scales included.
        experts: of experts left unpacked.
        plain: of everything else.
        largest_packed: `(N, K)` of the largest packed matrix of an `nn.Linear`; `(0, 0)` if none is.
    """

    packed: int
    experts: int
    plain: int
    largest_packed: tuple[int, int] = (0, 0)

    @property
    def total(self) -> int:
        return self.packed + self.experts + self.plain


def count_weights(model: PreTrainedModel, quantization: Quantization) -> WeightBytes:
    """Bytes of the weights as transformers would hold them under `quantization`.

    Args:
        model: nothing of it is packed yet, and its dtype is the scheme's; real, or on the meta device.
    """
    parameters = dict(model.named_parameters())  # a tied tensor once, under its first name
    plain = sum(buffer.nbytes for buffer in model.buffers())
    packed = experts = 0
    largest = (0, 0)
    skipped = quantization.skip_modules
    left = HfQuantizer.get_modules_to_not_convert(model, None if skipped is None else list(skipped))
    for name, parameter in parameters.items():
        place, _, key = name.rpartition(".")
        module = model.get_submodule(place)
        is_linear = type(module) is nn.Linear and key == "weight"
        if is_linear and quantization.method != "none" and should_convert_module(place, left):
            rows, columns = parameter.shape
            packed += quantization.matrix_bytes(rows, columns)
            largest = max(largest, (rows, columns), key=math.prod)
        elif parameter.ndim == 3 and "Experts" in type(module).__name__:
            experts += parameter.nbytes
        else:
            plain += parameter.nbytes
    return WeightBytes(packed, experts, plain, largest)
