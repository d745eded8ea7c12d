"""What `inspect` tells of a checkpoint without loading it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checks import FLOAT_DTYPES, Tensors
from .layouts import NESTED_LAYER_IDS, SGLANG_RULE

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class CheckpointSummary:
    """Facts of a checkpoint from its headers and config alone.

    `tensors` maps stored names to shapes; `parameters` counts float tensors; `stored_bytes` all tensors.
    `aux_layers_as_stored` holds the layer ids as written, by place; `config.aux_layers` the same as `hs` indices.
    """

    source: str
    format: str
    format_title: str
    method: str
    config: Eagle31Config
    dtype: str
    parameters: int
    stored_bytes: int
    tensors: dict[str, tuple[int, ...]]
    aux_layers_as_stored: dict[str, list[int]]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-ready values, the network's facts flattened beside the file's."""
        facts = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
                 "aux_norm", "norm_output", "norm_before_residual", "qk_norm", "fc_bias", "own_embedding",
                 "own_lm_head", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "aux_layers")  # fmt: skip
        return {
            **{name: value for name, value in vars(self).items() if name != "config"},
            **{fact: getattr(self.config, fact) for fact in facts},
            "tensors": {name: list(shape) for name, shape in self.tensors.items()},
            "notes": list(self.notes),
        }


def count_parameters(tensors: Tensors) -> int:
    """Elements of all float tensors."""
    return sum(math.prod(info.shape) for info in tensors.values() if info.dtype in FLOAT_DTYPES)


def count_bytes(tensors: Tensors) -> int:
    """Bytes of all tensors as stored."""
    return sum(math.prod(info.shape) * _BYTES.get(info.dtype, 1) for info in tensors.values())


def caution_notes(
    format_name: str, config: Eagle31Config, id_places: Collection[str], left_over: bool
) -> tuple[str, ...]:
    """What a file cannot tell for sure and only acceptance would show.

    Args:
        id_places: where it names layers.
        left_over: whether there is a `quantization_config` beside float weights.
    """
    notes = []
    if format_name == "specforge" and config.norm_output and config.aux_norm == "none":
        notes.append(
            "SpecForge before its fix #879 (2026-09) wrote norm_output=true for drafters trained with pre-norm "
            "feedback: if acceptance falls sharply after the first token, set norm_output to false"
        )
    if NESTED_LAYER_IDS in id_places and format_name in ("specforge", "modelopt"):
        notes.append(
            f"stored layer ids are read as SGLang does ({SGLANG_RULE}): hidden states {config.aux_layers}; if "
            "acceptance is near chance, try their neighbours"
        )
    if config.sliding_window is not None:
        notes.append(f"sliding window: the drafter sees {config.sliding_window} tokens back, as config.json says")
    if left_over:
        notes.append("config.json has a quantization_config, the weights are floats: it is the target's, and not read")
    return tuple(notes)
