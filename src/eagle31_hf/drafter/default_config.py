"""The configuration of a fresh drafter, from its target's."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..configuration_eagle31 import Eagle31Config
from ..errors import IncompatibleTargetError
from ..memory.layer_sizes import sizes_by_layer, trained_context

UNTOLD_CONTEXT = 2048  # longest text of a drafter whose target does not tell its own


def default_config(target: PreTrainedModel, **overrides: Any) -> Eagle31Config:
    """An EAGLE 3.1 configuration shaped like the first layer of `target`.

    Raises:
        IncompatibleTargetError: its configuration lacks what a drafter must know.
        ConfigurationError: `overrides` make no possible drafter.
    """
    text = target.config.get_text_config(decoder=True)
    try:
        layer = sizes_by_layer(text)[0]
        fields: dict[str, Any] = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise IncompatibleTargetError(
            f"the config of {type(target).__name__} does not tell the sizes of its layers ({error}); pass "
            "config=Eagle31Config(...) with hidden_size and vocab_size of the target"
        ) from error
    fields |= {
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.attention_heads,
        # The one latent key of a DeepSeek layer is no pattern for a layer that has keys of its own.
        "num_key_value_heads": layer.kv_heads if layer.key_dim == layer.value_dim else layer.attention_heads,
        "head_dim": layer.value_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-5),
        "max_position_embeddings": trained_context(text) or UNTOLD_CONTEXT,
        "aux_norm": "per_slot",
        "norm_output": True,
    }
    fields |= {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Eagle31Config(**{**fields, **overrides})
