"""A target's facts from its folder's `config.json` and the headers of its weights, without importing transformers.

Only folders whose tensors are a plain decoder's, each as large as the configuration says, are read here: embedding,
layers of attention with a full view and a gated MLP, norms, head. Nothing is known of families; anything else is left
to the model class itself (`target_facts`), and so is everything that is wrong with a folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..checkpoints.files import INDEX_FILE, WEIGHTS_FILE, open_tensors, read_json
from ..errors import CheckpointFormatError
from .weight_bytes import WeightInventory, WeightTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    Config: TypeAlias = "PreTrainedConfig | PlainDecoder"

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "max_position_embeddings")  # fmt: skip
_LEFT_TO_THE_CLASS = re.compile(
    "text_config|quantization_config|auto_map|.*expert.*|kv_lora_rank|attention_chunk_size|attn_temperature_tuning|"
    "per_layer_config|multi_query|partial_rotary_factor|.*attn_implementation|.*multiplier|.*softcapping"
)
_KNOWN_BUFFER = re.compile(r".*rotary_emb\.inv_freq")  # stored by old versions, made anew by all


class PlainDecoder(SimpleNamespace):
    """A folder that holds a plain decoder: its `config.json` as transformers would read it, fields as attributes.

    Attributes:
        dtype: as the file names it.
        inventory: its tensors, rotary tables included.
    """

    inventory: WeightInventory

    def get_text_config(self, decoder: bool = True) -> PlainDecoder:
        return self


def read_plain_decoder(folder: Path) -> PlainDecoder | None:
    """The plain decoder in a folder; `None` if it holds another model, or anything that is not understood."""
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return None
    try:
        config = read_json(folder / "config.json")
        if not _is_plain(config):
            return None
        shapes = {name: info.shape for name, info in open_tensors(folder).infos.items()}
    except CheckpointFormatError:
        return None
    shapes = {name: shape for name, shape in shapes.items() if not _KNOWN_BUFFER.fullmatch(name)}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tied = config["tie_word_embeddings"]
    wanted = _expected_shapes(config, head_dim)
    if tied:
        wanted.pop("lm_head.weight")
    optional = {name for name in wanted if name.endswith(".bias") or re.search(r"\.[qk]_norm\.", name)}
    if not wanted.keys() - optional <= shapes.keys() <= wanted.keys():
        return None
    if any(shape != wanted[name] for name, shape in shapes.items()):
        return None
    in_order = {name: shape for name, shape in wanted.items() if name in shapes}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return PlainDecoder(**config | {"dtype": dtype, "inventory": _inventory(in_order, head_dim, tied)})


def _is_plain(config: dict[str, Any]) -> bool:
    sizes = [config.get(name) for name in _SIZES]
    rope = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    windowed = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return (
        all(type(size) is int and size >= 1 for size in sizes)
        and type(config.get("head_dim", 1) or 1) is int
        and type(config.get("tie_word_embeddings")) is bool
        and type(config.get("model_type")) is str
        and any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
        and not config.get("is_encoder_decoder")
        and not any(_LEFT_TO_THE_CLASS.fullmatch(name) and value is not None for name, value in config.items())
        and not windowed
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and not any(isinstance(value, dict) for part in rope for value in part.values())
        and not any("partial_rotary_factor" in part for part in rope)
    )


def _expected_shapes(config: dict[str, Any], head_dim: int) -> dict[str, tuple[int, ...]]:
    """Every tensor such a decoder may have, by the name most call it; biases and norms of heads are optional."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    matrices = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in matrices.items()}
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {**shapes, "lm_head.weight": table}


def _inventory(shapes: dict[str, tuple[int, ...]], head_dim: int, tied: bool) -> WeightInventory:
    tensors = []
    for name, shape in shapes.items():
        module, _, key = name.rpartition(".")
        role = "linear" if module.endswith("_proj") and key == "weight" else "other"
        role = {"lm_head": "head", "model.embed_tokens": "embedding"}.get(module, role)
        tensors.append(WeightTensor(module, shape, role, None, role == "head" or (tied and role == "embedding")))
    # Rotary frequencies, and the ones they were made from.
    tensors += [WeightTensor("model.rotary_emb", (head_dim // 2,), "other", 4)] * 2
    return WeightInventory(tuple(tensors), sum(tensor.elements for tensor in tensors[:-2]))
