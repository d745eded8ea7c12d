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
from .files import TensorInfo
from .formats import filled
from .json_files import shown

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

BLOCK = 64  # weights with a scale of their own, in 4 bits
NESTED_BLOCK = 256  # scales with a scale of their own, under double quantisation
LAYOUT = "eagle31_hf"
"""Marks a `quantization_config` whose tensors are laid out as here; bitsandbytes' own layout names them otherwise."""

METHODS = ("int8", "nf4", "fp4")
FUSED_PROJECTIONS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Our matrix: the published ones it stacks, top row first."""


@dataclass(frozen=True)
class PackingScheme:
    """How a drafter's matrices are packed.

    Attributes:
        method: `"int8"` (one scale per row), `"nf4"` or `"fp4"` (one scale per 64 weights).
        double_quant: of the 4-bit methods: the scales are packed to 8 bits, too.
        skip: names of matrices left as they are, e.g. `("lm_head",)`; a name's last parts suffice.
    """

    method: str
    double_quant: bool = False
    skip: tuple[str, ...] = ()

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
        kind = fields.get("quant_method", "bitsandbytes")
        if getattr(kind, "value", kind) != "bitsandbytes" or not (fields.get("load_in_8bit") or _in_4bit(fields)):
            raise ConfigurationError(
                f"got quantization_config={shown(quantization_config)}; drafters are packed by bitsandbytes: pass "
                "BitsAndBytesConfig(load_in_8bit=True) or BitsAndBytesConfig(load_in_4bit=True, "
                "bnb_4bit_quant_type='nf4')"
            )
        _refuse_unfollowed(fields)
        skip = fields.get("llm_int8_skip_modules") or ()
        if not isinstance(skip, list | tuple) or not all(isinstance(name, str) for name in skip):
            raise ConfigurationError(
                f"got llm_int8_skip_modules={shown(skip)} in quantization_config; wanted a list of names"
            )
        skip = tuple(skip)
        if not _in_4bit(fields):
            return cls("int8", skip=skip)
        return cls(str(fields.get("bnb_4bit_quant_type", "fp4")), bool(fields.get("bnb_4bit_use_double_quant")), skip)

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


def _in_4bit(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("load_in_4bit"))


def _refuse_unfollowed(fields: Mapping[str, Any]) -> None:
    storage = str(fields.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    wrong: dict[str, Any] = {}
    if storage != "uint8":
        wrong["bnb_4bit_quant_storage"] = storage
    if fields.get("llm_int8_has_fp16_weight"):
        wrong["llm_int8_has_fp16_weight"] = True
    if wrong:
        raise ConfigurationError(
            f"got {wrong} in quantization_config; a packed drafter is stored as uint8 and cannot be trained: leave "
            "these out"
        )


def packable_shapes(config: Eagle31Config) -> dict[str, tuple[int, int]]:
    """Every matrix that may be packed, `(rows, columns)` by the name it has in the network.

    That is attention, MLP and the draft head. `fc` reads the target's hidden states, where a few large entries would
    take all the precision, and is one matrix product per accepted token; norms and embedding are no products at all.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_hidden_layers):
        read = 2 * hidden if layer == 0 else hidden
        parts = {f"self_attn.{name}": size for name, size in _attention_matrices(config, read).items()}
        parts |= {"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)}
        shapes |= {f"layers.{layer}.{part}": size for part, size in parts.items()}
    if config.own_lm_head:
        shapes["lm_head"] = (filled(config.draft_vocab_size), hidden)
    return shapes


def _attention_matrices(config: Eagle31Config, read: int) -> dict[str, tuple[int, int]]:
    if config.is_latent:
        # Latent attention multiplies with parts of kv_b_proj's weight itself, which packed numbers do not have.
        return {name: size for name, size in latent_matrices(config, read).items() if name != "kv_b_proj"}
    heads, kv_heads, head_dim = config.num_attention_heads, filled(config.num_key_value_heads), filled(config.head_dim)
    return {
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, read),
        "o_proj": (config.hidden_size, heads * head_dim),
    }


def latent_matrices(config: Eagle31Config, read: int) -> dict[str, tuple[int, int]]:
    """Matrices of latent attention over rows `read` wide, `(rows, columns)` by published name."""
    heads, rank = config.num_attention_heads, filled(config.kv_lora_rank)
    plain, rotated, value = (
        filled(size) for size in (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    )
    query = heads * (plain + rotated)
    if config.q_lora_rank is None:
        matrices = {"q_proj": (query, read)}
    else:
        matrices = {"q_a_proj": (config.q_lora_rank, read), "q_b_proj": (query, config.q_lora_rank)}
    matrices["kv_a_proj_with_mqa"] = (rank + rotated, read)
    matrices["kv_b_proj"] = (heads * (plain + value), rank)
    return matrices | {"o_proj": (config.hidden_size, heads * value)}


def published_weights(module: str) -> list[str]:
    """Canonical names of the weights that the packed matrix `module` stands for."""
    for fused, parts in FUSED_PROJECTIONS.items():
        if module.endswith(fused):
            return [f"{module.removesuffix(fused)}{part}.weight" for part in parts]
    return [f"{module}.weight"]


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
