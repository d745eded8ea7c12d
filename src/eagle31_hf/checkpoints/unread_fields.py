"""Fields of published `config.json` files that have no place in a drafter: refused if they would change what it
computes, passed over if they would not.

A published config is often a copy of the target's, so most of what stands there is about another network. The layers of
a drafter are Llama's, Qwen3's or DeepSeek's; what some layer, head or loader of those kinds reads and this package does
not is in `CHANGES_THE_DRAFTER`. What is in neither list nobody here knows, and `inspect` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError
from .formats import LATENT_SIZES, Format
from .json_files import get_path, shown

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

Harmless = Callable[[Any, "Eagle31Config"], bool]


def _one_of(*values: Any) -> Harmless:
    return lambda value, config: any(value is v or (value == v and type(value) is not bool) for v in values)


def _close_to(wanted: Callable[[Eagle31Config], float]) -> Harmless:
    def is_close(value: Any, config: Eagle31Config) -> bool:
        return type(value) in (int, float) and abs(value - wanted(config)) <= 1e-6 * abs(wanted(config))

    return is_close


_UNSCALED = _one_of(1)
_OFF, _ON = _one_of(False, 0), _one_of(True)
_SCORE_SCALE = _close_to(lambda config: math.sqrt(1 / (config.head_dim or 1)))
_HEAD_DIM = _close_to(lambda config: float(config.head_dim or 0))
_THETA = _close_to(lambda config: float((config.rope_parameters or {}).get("rope_theta") or 0))
_PAIRS = lambda value, config: value is config.is_latent  # noqa: E731 (latent attention turns neighbours as a pair)

CHANGES_THE_DRAFTER: Mapping[str, Harmless] = {
    # scores and states are scaled or capped: Granite, Cohere, Gemma, OLMo
    "logit_scale": _UNSCALED,
    "logits_scaling": _UNSCALED,
    "embedding_multiplier": _UNSCALED,
    "residual_multiplier": _UNSCALED,
    "attention_multiplier": _SCORE_SCALE,
    "softmax_scale": _SCORE_SCALE,
    "query_pre_attn_scalar": _HEAD_DIM,
    "final_logit_softcapping": _one_of(),
    "attn_logit_softcapping": _one_of(),
    "clip_qkv": _one_of(),
    # other rotations, or none: GLM, GPT-NeoX, MiniMax, Gemma 3, Llama 4, SmolLM3, HunYuan, Kimi K3
    "rotary_dim": _HEAD_DIM,
    "rotary_pct": _UNSCALED,
    "rope_ratio": _UNSCALED,
    "rope_alpha": _UNSCALED,
    "rope_base": _THETA,
    "rotary_base": _THETA,
    "rotary_emb_base": _THETA,
    "rope_local_base_freq": lambda value, config: config.sliding_window is None or _THETA(value, config),
    "rope_interleave": _PAIRS,
    "rope_interleaved": _PAIRS,
    "use_rope": _ON,
    "use_rotary_pos_emb": _ON,
    "position_embedding_type": _one_of("rope", "rotary"),
    "no_rope_layers": lambda value, config: (
        isinstance(value, list) and all(turned == 1 for turned in value[: config.num_hidden_layers])
    ),
    "mla_use_nope": _OFF,
    # other attention: Llama 4, Mistral 3, embedding models, HunYuan
    "attention_chunk_size": _one_of(0),
    "attn_temperature_tuning": _OFF,
    "llama_4_scaling": _one_of(),
    "is_causal": _ON,
    "use_bidirectional_attention": _OFF,
    "use_cla": _OFF,
    # another order of parts
    "norm_type": _one_of("rms", "rmsnorm", "RMSNorm", "rms_norm"),
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
    "eagle_config.use_input_layernorm_in_first_layer": _ON,
    "eagle_config.use_last_layernorm": _ON,
    "eagle_config.use_mtp_layernorm": _OFF,
    "eagle_config.parallel_draft_step": _one_of(0, 1),
}
"""Dotted name to a test: whether a drafter with this value is the one this package computes. `null` always is."""

WITHOUT_EFFECT = frozenset({
    "_attn_implementation", "_name_or_path", "_torchspec_version", "add_classification_head", "architectures",
    "attention_dropout", "attention_head_dim", "attention_k_eq_v", "attn_implementation", "attn_output_gate",
    "auto_map", "block_size", "bos_token_id", "cla_share_factor", "class_num", "decoder_sparse_step",
    "dense_list", "dim_model_base", "draft_num_hidden_layers", "dtype", "eagle_config.eagle_decoder_type",
    "eagle_config.has_lm_head", "eagle_config.next_layer_regular", "eagle_config.parallel_draft_heads_num_layers",
    "eagle_config.use_aux_hidden_state", "embed_requires_grad", "enable_moe_block", "eod_token_id", "eos_token_id",
    "ep_size", "first_k_dense_replace", "full_attention_interval", "global_head_dim",
    "hidden_size_per_layer_input", "im_end_id", "im_newline_id", "im_start_id", "image_end_token_id",
    "image_newline_token_id", "image_start_token_id", "image_token_id", "initial_context_length", "kept_for_formats",
    "mask_init_id", "max_window_layers", "mlp_only_layers", "modal_type", "model_type",
    "moe_intermediate_size", "moe_layer_freq", "mtp_num_hidden_layers", "mup_denominator", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_global_key_value_heads", "num_kv_shared_layers", "num_local_experts", "num_nextn_predict_layers",
    "num_target_layers", "org_vocab_size", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_id", "pad_token_id", "pool_type", "pretraining_tp", "quantization_config", 
    "routed_scaling_factor", "router_aux_loss_coef", "scale_depth", "scale_emb",
    "scoring_func", "sep_token_id", "seq_aux", "shared_expert_intermediate_size", "sliding_window_pattern",
    "speculators_config", "speculators_model_type", "speculators_version", "step_loss_decay", "swiglu_limit",
    "target_model", "target_model_name_or_path", "target_model_type", "target_text_model_type", "text_end_id",
    "text_start_id", "tie_word_embeddings", "top_k_experts", "topk_group", "topk_method", "torch_dtype",
    "transformers_version", "ttt_length", "use_cache", "use_double_wide_mlp",
    "use_mrope", "use_qk_norm", "video_token_id", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
    "vocab_size_per_layer_input",
})  # fmt: skip
"""What published files say about their target, their training, or things that tensors and shapes tell better."""


def refuse_unread_fields(table: Format, stored: Mapping[str, Any], config: Eagle31Config) -> None:
    """Raise a `CheckpointFormatError` if `stored` (`config.json`) asks for another network than `config` tells of."""
    if table.ignores_the_rest:
        return
    for name, is_harmless in CHANGES_THE_DRAFTER.items():
        value = get_path(stored, name if "." in name else table.layer_config + name)
        if value is not None and not is_harmless(value, config):
            raise CheckpointFormatError(
                f"config.json: {name} is {shown(value)}, which changes what a drafter computes and is not computed "
                "here; such a drafter cannot be read. If it is left from the target's config and the drafter was "
                "trained without it, remove it"
            )


def unknown_fields(table: Format, stored: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Names in `config.json` that nothing here knows, beside those `read`.

    Sections count whole, but for the layers' and `eagle_config`.
    """
    known = {*read, *LATENT_SIZES} | WITHOUT_EFFECT  # latent sizes beside other attention are the target's
    known |= {name if "." in name else table.layer_config + name for name in CHANGES_THE_DRAFTER}
    known |= {table.layer_config + name for name in WITHOUT_EFFECT}
    sections = {"eagle_config", table.layer_config.rstrip(".")}
    names = [name for name in stored if name not in sections]
    for section in sections & stored.keys():
        names += [f"{section}.{name}" for name in stored[section] or ()]
    return sorted(name for name in names if name not in known)
