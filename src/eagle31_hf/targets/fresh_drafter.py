"""The configuration of a fresh drafter, from its target's: sizes of layers, whatever a family calls them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..config import Eagle31Config
from ..errors import ConfigurationError, IncompatibleTargetError

_SHALLOW = 7  # layers from which on the published default names three different states in order
UNTOLD_CONTEXT = 2048  # longest text of a drafter whose target does not tell its own
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")  # GPT-2, OPT, Falcon
_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads")  # Falcon
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT, Bloom


class LayerSizes(NamedTuple):
    """One decoder layer, its heads as attention sees them; `key_dim` and `value_dim` differ for latent attention."""

    attention_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    intermediate_size: int


def sizes_by_layer(config: PreTrainedConfig) -> list[LayerSizes]:
    """Sizes of every decoder layer of a model of this configuration."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: heads of global layers are wider
        return [_layer_sizes(layer) for layer in text.per_layer_config]
    return [_layer_sizes(text)] * text.num_hidden_layers


def _layer_sizes(layer: PreTrainedConfig) -> LayerSizes:
    heads, hidden = layer.num_attention_heads, layer.hidden_size
    intermediate = _first(layer, _INTERMEDIATE_NAMES) or 4 * hidden
    if getattr(layer, "kv_lora_rank", None):
        return LayerSizes(heads, 1, layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim, intermediate)
    one_key = getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False)
    kv_heads = 1 if one_key else _first(layer, _KV_HEADS_NAMES) or heads  # Falcon, GPT-BigCode
    width = getattr(layer, "head_dim", None) or hidden // heads
    return LayerSizes(heads, kv_heads, width, getattr(layer, "v_head_dim", None) or width, intermediate)


def trained_context(config: PreTrainedConfig) -> int | None:
    """Tokens the model was made for; `None` if its configuration does not tell."""
    return _first(config.get_text_config(decoder=True), _CONTEXT_NAMES)


def _first(config: PreTrainedConfig, names: Sequence[str]) -> Any:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def default_config(target: PreTrainedConfig, **overrides: Any) -> Eagle31Config:
    """An EAGLE 3.1 configuration shaped like the first layer of a target of the configuration `target`.

    Raises:
        IncompatibleTargetError: it lacks what a drafter must know.
        ConfigurationError: `overrides` make no possible drafter.
    """
    text = target.get_text_config(decoder=True)
    try:
        layer = sizes_by_layer(text)[0]
        fields: dict[str, Any] = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise IncompatibleTargetError(
            f"the target's {type(target).__name__} does not tell the sizes of its layers ({error}); pass "
            "config=Eagle31Config(...) with hidden_size and vocab_size of the target"
        ) from error
    fields |= {
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.attention_heads,
        # The one latent key of a DeepSeek layer is no pattern for a layer that has keys of its own.
        "num_key_value_heads": layer.kv_heads if layer.key_dim == layer.value_dim else layer.attention_heads,
        "head_dim": layer.value_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,  # null where the target's norms are others
        "max_position_embeddings": trained_context(text) or UNTOLD_CONTEXT,
        "aux_norm": "per_slot",
        "norm_output": True,
    }
    if (heads := overrides.get("num_attention_heads")) is not None:
        fields["num_key_value_heads"] = math.gcd(fields["num_key_value_heads"], heads)  # groups of one size
    fields |= {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Eagle31Config(**{**fields, **overrides})


def with_distinct_states(config: Eagle31Config, num_target_layers: int) -> Eagle31Config:
    """The configuration of a drafter about to be made, whose hidden states are all different ones.

    The published default, `2, L//2, L-3`, names one state twice or the states out of order where a target has fewer
    than seven layers. Drafters that were trained so are read so; a fresh one takes three in a row.

    Raises:
        ConfigurationError: the target has too few layers for three.
    """
    if config.aux_layers is not None or config.num_aux_hidden_states != 3 or num_target_layers >= _SHALLOW:
        return config
    if num_target_layers < 3:
        some = list(range(num_target_layers + 1))
        raise ConfigurationError(
            f"a target of {num_target_layers} layer{'s' * (num_target_layers > 1)} has too few for the three hidden "
            f"states that a fresh drafter reads; say which to read, 0 being the embedding: from_target(target, "
            f"aux_layers={some}, num_aux_hidden_states={len(some)})"
        )
    first = min(2, num_target_layers - 2)
    config = copy.deepcopy(config)
    config.aux_layers = [first, first + 1, first + 2]
    return config
