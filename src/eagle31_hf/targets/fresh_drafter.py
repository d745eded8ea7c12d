"""The configuration of a fresh drafter, from its target's: sizes of layers, whatever a family calls them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..config import Eagle31Config
from ..errors import IncompatibleTargetError

_SHALLOW = 7  # layers from which on the published default, `2, L//2, L-3`, names three different states in order
UNTOLD_CONTEXT = 2048  # longest text of a drafter whose target does not tell its own
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")  # GPT-2, OPT, Falcon
_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads")  # Falcon
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT, Bloom


def _sizes_of_first_layer(text: PreTrainedConfig) -> dict[str, int]:
    """As fields of a drafter's configuration."""
    # Gemma 4: heads of global layers are wider.
    layer = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
    heads, hidden = layer.num_attention_heads, layer.hidden_size
    width = getattr(layer, "head_dim", None) or hidden // heads
    value_width = getattr(layer, "v_head_dim", None) or width
    one_key = getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False)
    kv_heads = 1 if one_key else _first(layer, _KV_HEADS_NAMES) or heads  # Falcon, GPT-BigCode
    if getattr(layer, "kv_lora_rank", None) or value_width != width:
        kv_heads = heads  # one latent key is no pattern for a layer that has keys of its own
    return {
        "intermediate_size": _first(layer, _INTERMEDIATE_NAMES) or 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value_width,
    }


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
        fields: dict[str, Any] = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
        fields |= _sizes_of_first_layer(text)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise IncompatibleTargetError(
            f"the target's {type(target).__name__} does not tell the sizes of its layers ({error}); pass "
            "config=Eagle31Config(...) with hidden_size and vocab_size of the target"
        ) from error
    fields |= {
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,  # null where the target's norms are others
        "max_position_embeddings": trained_context(text) or UNTOLD_CONTEXT,
        "aux_norm": "per_slot",
        "norm_output": True,
    }
    if (heads := overrides.get("num_attention_heads")) is not None:
        fields["num_key_value_heads"] = math.gcd(fields["num_key_value_heads"], heads)  # groups of one size
    if 3 <= text.num_hidden_layers < _SHALLOW and overrides.get("num_aux_hidden_states", 3) == 3:
        first = min(2, text.num_hidden_layers - 2)
        fields["aux_layers"] = [first, first + 1, first + 2]
    fields |= {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Eagle31Config(**{**fields, **overrides})
