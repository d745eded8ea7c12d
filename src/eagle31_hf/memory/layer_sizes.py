"""Sizes of a target's decoder layers from its configuration, whatever its family calls them.

Most families follow Llama's names or map theirs to them (`attribute_map`). Left over are MLP widths and context lengths
under older names, and configurations whose layers differ (Gemma 4: heads of global layers are wider), which
transformers lets nobody read as if they were one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")  # GPT-2, OPT, Falcon
_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads")  # Falcon
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT, Bloom


class LayerSizes(NamedTuple):
    """One decoder layer: its heads as attention sees them, and what its cache keeps of a token.

    Attributes:
        key_dim, value_dim: per head; they differ for latent attention, which caches what both are made from.
        cached_heads, cached_elements: heads a cache tells apart, and elements of a token's keys and values in one.
        expanded_elements: made of a cached token for each head while it is attended to; 0: it is as it is cached.
    """

    attention_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    cached_heads: int
    cached_elements: int
    intermediate_size: int
    expanded_elements: int = 0


def sizes_by_layer(config: PreTrainedConfig) -> list[LayerSizes]:
    """Sizes of every decoder layer of a model of this configuration, the first layer's first."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):
        return [_layer_sizes(layer) for layer in text.per_layer_config]
    sizes = _layer_sizes(text)
    if text.model_type == "mimo_v2_flash":  # where a window is seen, twice as many heads of keys and values
        windowed = sizes._replace(kv_heads=2 * sizes.kv_heads, cached_heads=2 * sizes.cached_heads)
        return [windowed if kind == "sliding_attention" else sizes for kind in text.layer_types]
    return [sizes] * text.num_hidden_layers


def trained_context(config: PreTrainedConfig) -> int | None:
    """Tokens the model was made for; `None` if its configuration does not tell."""
    return _first(config.get_text_config(decoder=True), _CONTEXT_NAMES)


def _layer_sizes(layer: PreTrainedConfig) -> LayerSizes:
    heads, kv_heads = layer.num_attention_heads, _kv_heads(layer)
    intermediate = _first(layer, _INTERMEDIATE_NAMES) or 4 * layer.hidden_size
    if latent := getattr(layer, "kv_lora_rank", None):
        # One latent and one rotated key of all heads are cached; keys and values are made of them when attended to.
        key_dim, cached = layer.qk_nope_head_dim + layer.qk_rope_head_dim, latent + layer.qk_rope_head_dim
        expanded = layer.qk_nope_head_dim + layer.v_head_dim + key_dim  # keys are then joined anew
        return LayerSizes(heads, 1, key_dim, layer.v_head_dim, 1, cached, intermediate, expanded)
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    value_width = getattr(layer, "v_head_dim", None) or width
    return LayerSizes(heads, kv_heads, width, value_width, kv_heads, width + value_width, intermediate)


def _kv_heads(layer: PreTrainedConfig) -> int:
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1  # Falcon, GPT-BigCode
    return _first(layer, _KV_HEADS_NAMES) or layer.num_attention_heads


def _first(config: PreTrainedConfig, names: Sequence[str]) -> Any:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
