"""Weights packed by bitsandbytes: which of a drafter's matrices, as which tensors, and how that is written down.

A packed drafter keeps the layout it would have unpacked, but for its matrices: those are stored as the network holds
them, query with key with value in one and gate with up in another, each as a handful of tensors. They are read back
bit for bit. No serving engine reads them; for those, write the unpacked drafter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError, ConfigurationError
from .files import TensorInfo, shown
from .shapes import packable_shapes

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

BLOCK = 64  # weights with a scale of their own, in 4 bits
NESTED_BLOCK = 256  # scales with a scale of their own, under double quantisation
LAYOUT = "eagle31_hf"
"""Marks a `quantization_config` whose tensors are laid out as here; bitsandbytes' own layout names them otherwise."""

METHODS = ("int8", "nf4", "fp4")


@dataclass(frozen=True)
class PackingScheme:
    """How a drafter's matrices are packed."""

    method: str  # `"int8"` (one scale per row), `"nf4"` or `"fp4"` (one scale per 64 weights)
    double_quant: bool = False  # of the 4-bit methods: the scales are packed to 8 bits, too
    skip: tuple[str, ...] = ()  # names of matrices left as they are, e.g. `("lm_head",)`; a name's last parts suffice.

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"got packing method {shown(self.method)}; wanted one of {', '.join(METHODS)}")

    @classmethod
    def of(cls, quantization_config: Any) -> PackingScheme:
        """A scheme from transformers' `BitsAndBytesConfig`, or from its dict.

        `bnb_4bit_compute_dtype` is not looked at, a drafter computes in its own dtype; nor is `llm_int8_threshold`,
        a drafter's inputs are all packed.

        Raises:
            ConfigurationError: another method, or a setting that cannot be followed.
        """
        if isinstance(quantization_config, cls):
            return quantization_config
        fields = quantization_config
        if not isinstance(fields, Mapping):
            fields = quantization_config.to_dict() if hasattr(quantization_config, "to_dict") else {}
        kind, in_4bit = fields.get("quant_method", "bitsandbytes"), bool(fields.get("load_in_4bit"))
        if getattr(kind, "value", kind) != "bitsandbytes" or not (fields.get("load_in_8bit") or in_4bit):
            raise ConfigurationError(
                f"got quantization_config={shown(quantization_config)}; drafters are packed by bitsandbytes: pass "
                "BitsAndBytesConfig(load_in_8bit=True) or BitsAndBytesConfig(load_in_4bit=True, "
                "bnb_4bit_quant_type='nf4')"
            )
        storage = str(fields.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        wrong: dict[str, Any] = {} if storage == "uint8" else {"bnb_4bit_quant_storage": storage}
        if fields.get("llm_int8_has_fp16_weight"):
            wrong["llm_int8_has_fp16_weight"] = True
        if wrong:
            raise ConfigurationError(
                f"got {wrong} in quantization_config; a packed drafter is stored as uint8 and cannot be trained: leave "
                "these out"
            )
        skip = fields.get("llm_int8_skip_modules") or ()
        if not isinstance(skip, list | tuple) or not all(isinstance(name, str) for name in skip):
            raise ConfigurationError(
                f"got llm_int8_skip_modules={shown(skip)} in quantization_config; wanted a list of names"
            )
        if not in_4bit:
            return cls("int8", skip=tuple(skip))
        kind, nested = fields.get("bnb_4bit_quant_type", "fp4"), fields.get("bnb_4bit_use_double_quant")
        return cls(str(kind), bool(nested), tuple(skip))

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` of a `config.json`."""
        fields: dict[str, Any] = {"quant_method": "bitsandbytes", "layout": LAYOUT}
        if self.method == "int8":
            fields["load_in_8bit"] = True
        else:
            fields |= {"load_in_4bit": True, "bnb_4bit_quant_type": self.method}
            fields["bnb_4bit_use_double_quant"] = self.double_quant
        return fields | {"llm_int8_skip_modules": list(self.skip) or None}

    def tensor_infos(self, rows: int, columns: int) -> dict[str, TensorInfo]:
        """The tensors that stand for a matrix of `rows` outputs and `columns` inputs, by the last part of their name.

        They are those of bitsandbytes: `absmax` and `scale` are a block's or a row's largest weight, the codes are
        the tables that packed numbers are looked up in.
        """
        if self.method == "int8":
            return {"weight": TensorInfo((rows, columns), "int8"), "scale": TensorInfo((rows,), "float32")}
        blocks = math.ceil(rows * columns / BLOCK)
        infos = {"weight": TensorInfo((math.ceil(rows * columns / 2), 1), "uint8")}
        infos["absmax"] = TensorInfo((blocks,), "uint8" if self.double_quant else "float32")
        infos["code"] = TensorInfo((16,), "float32")
        if self.double_quant:
            infos["nested_absmax"] = TensorInfo((math.ceil(blocks / NESTED_BLOCK),), "float32")
            infos["nested_code"] = TensorInfo((256,), "float32")
            infos["offset"] = TensorInfo((), "float32")
        return infos

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one packed matrix, scales and tables included."""
        infos = self.tensor_infos(rows, columns).values()
        return sum(math.prod(info.shape) * (4 if info.dtype == "float32" else 1) for info in infos)

    def packs(self, name: str, shape: tuple[int, int], element_bytes: int) -> bool:
        """Whether the matrix `name` is worth it: it is not to be skipped, and packing makes it smaller.

        In 4 bits a row must be whole blocks. Where a block reaches into the next row, bitsandbytes has no fused kernel,
        and its kernel for CPUs takes the wrong scales without a word (0.50.2, rows of 16, 32, 48, 96, ... weights).

        Args:
            element_bytes: of one weight that is not packed.
        """
        skipped = any(name == key or name.endswith(f".{key}") for key in self.skip)
        aligned = self.method == "int8" or shape[1] % BLOCK == 0
        return not skipped and aligned and self.packed_bytes(*shape) < math.prod(shape) * element_bytes


def packed_infos(
    config: Eagle31Config, scheme: PackingScheme, stored: Mapping[str, TensorInfo]
) -> dict[str, dict[str, TensorInfo]]:
    """The packed matrices among `stored` tensors (canonical names): module to its tensors, checked against `config`.

    Raises:
        CheckpointFormatError: a packed matrix is not whole, or not of the size or scheme that `config.json` tells.
    """
    found: dict[str, dict[str, TensorInfo]] = {}
    for module, shape in packable_shapes(config).items():
        wanted = scheme.tensor_infos(*shape)
        got = {part: stored[f"{module}.{part}"] for part in wanted if f"{module}.{part}" in stored}
        if f"{module}.weight" not in stored or got["weight"].dtype not in ("int8", "uint8"):
            continue  # left unpacked
        if got != wanted:
            raise CheckpointFormatError(
                f"{module} is not packed as config.json tells ({scheme.method}"
                f"{', scales packed' if scheme.double_quant else ''}): got {_told(got)}, wanted {_told(wanted)}; "
                "fetch the checkpoint again, or pack it anew from the unpacked drafter"
            )
        found[module] = got
    return found


def _told(infos: Mapping[str, TensorInfo]) -> str:
    return ", ".join(f"{name} {list(info.shape)} {info.dtype}" for name, info in infos.items())
