"""A drafter's configuration without transformers, whose configurations import torch: seconds, for a few whole numbers.

Only what is certain from the numbers alone is read here: attention by heads, Llama's rotary tables and activation. For
anything else `Eagle31Config` is asked, which also says what is wrong with a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

_LARGEST_SIZE = 1 << 24
_MOST_AUX_STATES = 256
_CERTAIN = {"aux_norm": ("none", "per_slot", "concatenated"), "hidden_act": ("silu",), "kv_lora_rank": (None,),
            "q_lora_rank": (None,), "qk_nope_head_dim": (None,), "qk_rope_head_dim": (None,),
            "v_head_dim": (None,)}  # fmt: skip


@dataclass
class PlainConfig:
    """The fields of `Eagle31Config` that checks, summaries and memory plans read, of a drafter like most."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    num_aux_hidden_states: int = 3
    aux_layers: list[int] | None = None
    aux_norm: str = "none"
    norm_output: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = None
    kv_lora_rank: None = None
    q_lora_rank: None = None
    qk_nope_head_dim: None = None
    qk_rope_head_dim: None = None
    v_head_dim: None = None
    rope_parameters: dict[str, Any] | None = None
    name_or_path: str = ""

    is_latent = False

    @property
    def is_eagle31(self) -> bool:
        return self.aux_norm != "none" and self.norm_output

    def __getattr__(self, name: str) -> Any:
        """What else `Eagle31Config` has is asked of it."""
        if name.startswith("_"):
            raise AttributeError(name)
        from ..configuration_eagle31 import Eagle31Config

        return getattr(Eagle31Config(**vars(self)), name)


def plain_config(stored: Mapping[str, Any]) -> Eagle31Config | None:
    """The configuration these fields of `Eagle31Config` make, if that is certain without it.

    Typed as `Eagle31Config`, whose fields it has as far as headers and plans are concerned.
    """
    values = dict(stored)
    for field, filled in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(field) is None:
            values[field] = values.get(filled)
    try:
        config = PlainConfig(**values)
    except TypeError:  # a field that has no default is missing, or one is unknown
        return None
    certain = all(_is_certain(each.name, str(each.type), getattr(config, each.name)) for each in fields(config))
    return cast("Eagle31Config", config) if certain and _fit_together(config) else None


def _is_certain(name: str, kind: str, value: Any) -> bool:
    if name in _CERTAIN:
        return value in _CERTAIN[name]
    if name == "rope_parameters":
        return value is None or (value.keys() == {"rope_type", "rope_theta"} and value["rope_type"] == "default"
                                 and 1 <= value["rope_theta"] <= 1e12)  # fmt: skip
    if name == "aux_layers":
        return value is None or (type(value) is list and bool(value) and all(type(i) is int and i >= 0 for i in value))
    if name.endswith("_token_id"):
        return value is None or (type(value) is int and 0 <= value < _LARGEST_SIZE)
    if kind == "bool":
        return type(value) is bool
    if kind == "float":
        return type(value) is float and 0 <= value < 1
    if kind == "str":
        return type(value) is str
    return (value is None and "None" in kind) or (type(value) is int and 1 <= value <= _LARGEST_SIZE)


def _fit_together(config: PlainConfig) -> bool:
    same_width = config.target_hidden_size == config.hidden_size
    return (
        config.num_attention_heads % config.num_key_value_heads == 0
        and config.head_dim % 2 == 0
        and config.draft_vocab_size <= config.vocab_size
        and config.num_aux_hidden_states <= _MOST_AUX_STATES
        and (same_width or (config.own_embedding and config.own_lm_head))
        and (config.aux_layers is None or len(config.aux_layers) == config.num_aux_hidden_states)
    )
