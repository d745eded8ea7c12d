"""Bytes of a model's weights: walked over the storages of a loaded one, or counted from shapes alone.

Shapes come from the model class itself, built on the meta device (no memory, no weights), so every architecture
transformers knows is counted exactly. Tied tensors count once. What each way of packing costs is exact for what
transformers loads: the tests compare it with the storages of models really loaded. `n = N*K` for a matrix of `N` rows
(outputs) and `K` columns (inputs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import MemoryPlanError, first_line, removal

# --- how they are stored ----------------------------------------------------------------------------------------------

BLOCK = 64
"""Weights with a scale of their own, where bitsandbytes packs in 4 bits."""
_NESTED_BLOCK = 256  # scales with a scale of their own, under double quantisation
AS_STORED = "as stored"
"""Method of weights that are packed in a way that has no formula here: they take what their files do."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Quantization:
    """How a target's weights are stored.

    Attributes:
        method: key of `METHODS`.
        dtype: of everything left unpacked, and of features and caches: `"bf16"`, `"fp16"` or `"fp32"`.
        group_size: weights with one scale; -1 is one group per row.
        double_quant: bitsandbytes packs the scales too.
        skip_modules: names left unpacked; `None` means what transformers leaves by default.
    """

    method: str
    dtype: str = "bf16"
    group_size: int = -1
    double_quant: bool = False
    skip_modules: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """As in `SCHEMES` for the common ones."""
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
    def rules(self) -> Method:
        return METHODS[self.method]

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one packed matrix with its scales; a bias is not packed and not counted here."""
        return self.rules.matrix_bytes(self, rows, columns)

    def workspace_bytes(self, rows: int, columns: int, tokens: int) -> int:
        """Bytes a matrix product with `tokens` inputs takes beyond input and output."""
        return self.rules.workspace_bytes(self, rows, columns, tokens)


@dataclass(frozen=True)
class Method:
    """One packing method: byte formula, its text for the ledger, and what of a model it reaches.

    Attributes:
        matrix_bytes: of a scheme, and of a matrix with `N` rows and `K` columns.
        workspace_bytes: the same, and for how many tokens.
    """

    formula: str
    matrix_bytes: Callable[[Quantization, int, int], int]
    workspace_bytes: Callable[[Quantization, int, int, int], int]
    packs_linears: bool = True
    packs_experts: bool = False


def packed_matrix_bytes(method: str, double_quant: bool, rows: int, columns: int) -> int:
    """Bytes of a matrix packed by bitsandbytes (`"int8"`, `"nf4"` or `"fp4"`), scales and tables included."""
    if method == "int8":
        return rows * columns + 4 * rows
    blocks = math.ceil(rows * columns / BLOCK)
    packed = math.ceil(rows * columns / 2) + 4 * 16
    if not double_quant:
        return packed + 4 * blocks
    return packed + blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) + 4 * 256 + 4


def _bitsandbytes(q: Quantization, rows: int, columns: int) -> int:
    return packed_matrix_bytes(q.method.removeprefix("bnb-"), q.double_quant, rows, columns)


def _fp8_block(q: Quantization, rows: int, columns: int) -> int:
    blocks = 1 if q.group_size <= 0 else math.ceil(rows / q.group_size) * math.ceil(columns / q.group_size)
    return rows * columns + 4 * blocks


def _no_workspace(q: Quantization, rows: int, columns: int, tokens: int) -> int:
    return 0


def _unpacked_copy(q: Quantization, rows: int, columns: int, tokens: int) -> int:
    return rows * columns * q.dtype_bytes


def _bnb_4bit_copy(q: Quantization, rows: int, columns: int, tokens: int) -> int:
    """bitsandbytes >= 0.50 always fuses up to 4 tokens; beyond, each card has its own table and may unpack."""
    return 0 if tokens <= 4 else rows * columns * q.dtype_bytes


_BNB_4BIT = Method("n/2 + 4n/64 + 64 (scales packed: n/2 + n/64 + 4n/16384 + 1092)", _bitsandbytes, _bnb_4bit_copy)
METHODS: dict[str, Method] = {
    AS_STORED: Method("size of the files", lambda q, n, k: n * k * q.dtype_bytes, _unpacked_copy),
    "none": Method("n*dtype", lambda q, n, k: n * k * q.dtype_bytes, _no_workspace, packs_linears=False),
    # Its workspace: int8 inputs, int32 products.
    "bnb-int8": Method("n + 4N", _bitsandbytes, lambda _, n, k, tokens: tokens * (k + 4 * n)),
    "bnb-nf4": _BNB_4BIT,
    "bnb-fp4": _BNB_4BIT,
    "fp8-block": Method(
        "n + 4*ceil(N/128)*ceil(K/128)", _fp8_block, lambda _, n, k, tokens: tokens * k, packs_experts=True
    ),
    "mxfp4": Method(
        "n/2 + n/32 (experts only)",
        lambda _, n, k: n * k // 2 + n * k // 32,
        _no_workspace,
        packs_linears=False,
        packs_experts=True,
    ),
}

SCHEMES: dict[str, Quantization] = {
    "bf16": Quantization("none", "bf16"),
    "fp16": Quantization("none", "fp16"),
    "fp32": Quantization("none", "fp32"),
    "bnb-int8": Quantization("bnb-int8"),
    "bnb-nf4": Quantization("bnb-nf4", group_size=64),
    "bnb-nf4-dq": Quantization("bnb-nf4", group_size=64, double_quant=True),
    "bnb-fp4": Quantization("bnb-fp4", group_size=64),
    "bnb-fp4-dq": Quantization("bnb-fp4", group_size=64, double_quant=True),
    "fp8-block": Quantization("fp8-block", group_size=128),
    "mxfp4": Quantization("mxfp4", group_size=32),
}
_OTHER_NAMES = {"4bit": "bnb-nf4-dq", "8bit": "bnb-int8",
                "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "bnb-int8", "nf4": "bnb-nf4",
                "nf4-dq": "bnb-nf4-dq", "fp4": "bnb-fp4", "fp8": "fp8-block"}  # fmt: skip


def scheme(quantization: str | dict[str, Any] | Quantization | Any, dtype: str = "bf16") -> Quantization:
    """A scheme by name (`SCHEMES`), or from a `quantization_config` (dict or transformers object).

    Args:
        dtype: of what stays unpacked, where the scheme leaves it open.

    Raises:
        MemoryPlanError: unknown; the known ones are listed.
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
        return _from_fields(quantization if isinstance(quantization, dict) else quantization.to_dict(), dtype)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, MemoryPlanError):
            raise
        raise MemoryPlanError(
            f"got quantization_config {str(quantization)[:160]!r}, which cannot be read ({first_line(error)}); name "
            f"one of {', '.join(SCHEMES)} instead"
        ) from error


def _from_fields(fields: dict[str, Any], dtype: str) -> Quantization:
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    if method not in _FROM_CONFIG:
        raise MemoryPlanError(
            f"got a quantization_config of quant_method {method!r}; known: {', '.join(_FROM_CONFIG)}; name the "
            f"nearest of {', '.join(SCHEMES)} instead"
        )
    skip = fields.get("modules_to_not_convert") or fields.get("llm_int8_skip_modules")
    return replace(_FROM_CONFIG[method](fields), dtype=dtype, skip_modules=tuple(skip) if skip else None)


def packed_as_stored(own: Any) -> bool:
    """Whether a target's own `quantization_config` names a way of packing that has no formula here."""
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    return method is not None and str(getattr(method, "value", method)) not in _FROM_CONFIG


def _from_bitsandbytes(fields: dict[str, Any]) -> Quantization:
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        return SCHEMES["bnb-int8"]
    kind = SCHEMES[f"bnb-{fields.get('bnb_4bit_quant_type', 'fp4')}"]
    return replace(kind, double_quant=bool(fields.get("bnb_4bit_use_double_quant")))


def _from_fp8(fields: dict[str, Any]) -> Quantization:
    block = fields.get("weight_block_size")
    return replace(SCHEMES["fp8-block"], group_size=int(block[0]) if block else -1)


_FROM_CONFIG: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "bitsandbytes": _from_bitsandbytes,
    "fp8": _from_fp8,
    "mxfp4": lambda fields: SCHEMES["mxfp4"],
}


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
        packed: of matrices and experts the method packs, scales included.
        experts: of experts left unpacked.
        plain: of everything else.
        largest_packed: `(N, K)` of the largest packed matrix of an `nn.Linear`; `(0, 0)` if none is.
        largest_tensor: bytes of the largest packed tensor before packing: held for a moment while loading.
    """

    packed: int
    experts: int
    plain: int
    largest_packed: tuple[int, int] = (0, 0)
    largest_tensor: int = 0

    @property
    def total(self) -> int:
        return self.packed + self.experts + self.plain


def count_weights(model: PreTrainedModel, quantization: Quantization) -> WeightBytes:
    """Bytes of the weights as transformers would hold them under `quantization`.

    Args:
        model: nothing of it is packed yet, and its dtype is the scheme's; real, or on the meta device.
    """
    rules = quantization.rules
    parameters = dict(model.named_parameters())  # a tied tensor once, under its first name
    plain = sum(buffer.nbytes for buffer in model.buffers())
    packed = experts = largest_tensor = 0
    largest = (0, 0)
    is_skipped = _skipped_modules(model, quantization, last=next(reversed(parameters), ""))
    for name, parameter in parameters.items():
        place, _, key = name.rpartition(".")
        module = model.get_submodule(place)
        is_linear = type(module) is nn.Linear and key == "weight"
        dimensions = parameter.ndim if "Experts" in type(module).__name__ else 0
        if (is_linear and rules.packs_linears and not is_skipped(place)) or (dimensions == 3 and rules.packs_experts):
            rows, columns = parameter.shape[-2:]
            packed += math.prod(parameter.shape[:-2]) * quantization.matrix_bytes(rows, columns)
            largest_tensor = max(largest_tensor, parameter.nbytes)
            if is_linear and rows * columns > math.prod(largest):
                largest = rows, columns
        elif dimensions == 3:
            experts += parameter.nbytes
        elif dimensions == 2 and rules.packs_experts:
            plain += parameter.numel() * 4  # biases are kept in fp32 beside packed experts
        else:
            plain += parameter.nbytes
    return WeightBytes(packed, experts, plain, largest, largest_tensor)


def _skipped_modules(model: PreTrainedModel, quantization: Quantization, last: str) -> Callable[[str], bool]:
    """Tells by its name whether a linear layer stays as it is; without names the LM head and the `last` parameter's."""
    patterns = quantization.skip_modules
    if patterns is None:
        head = model.get_output_embeddings()
        left = {last.rpartition(".")[0], *(name for name, module in model.named_modules() if module is head)}
        return left.__contains__
    # transformers matches from the start, or as a plain suffix
    whole = [re.compile(rf"(?:{key})(?:(?<=\.)|(?=\.|$))") for key in patterns]
    return lambda name: name.endswith(patterns) or any(pattern.match(name) for pattern in whole)
