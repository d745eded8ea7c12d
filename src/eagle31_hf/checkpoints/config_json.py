"""`config.json` of any drafter layout to `Eagle31Config` fields and back, by the tables of `layouts`.

A published config is often a copy of the target's, so most of what stands there is about another network. The layers of
a drafter are Llama's, Qwen3's or DeepSeek's; what some layer, head or loader of those kinds reads and this package does
not is in `harmless_values`, and refused unless its value changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from ..config import Eagle31Config
from ..errors import CheckpointFormatError, shown
from .files import get_path, set_path
from .layouts import (
    LATENT_SIZES,
    LAYER_ID_PLACES,
    LAYER_IDS,
    NESTED_LAYER_IDS,
    OTHER_LAYER_IDS,
    REQUIRED,
    Field,
    Layout,
    sglang_indices,
    to_hs_indices,
)

TARGET_MODEL = "target_model"
"""Metadata that every layout can hold: `{"name_or_path", "architectures"}` of the target."""
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_OF_ANOTHER = (
    "num_hidden_layers",
    "vocab_size",
    "num_aux_hidden_states",
    *LATENT_SIZES,
)  # where `eagle_config` has them


def read_config_fields(layout: Layout, config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """`config.json` as `Eagle31Config` fields, layer ids as `hs` indices.

    Args:
        num_layers: decoder layers among the file's tensors.

    Raises:
        CheckpointFormatError: a required entry is missing, two contradict, or one states another network.
    """
    _check_layers(layout, config)
    fields = {row.name: _read_field(row, config) for row in layout.fields}
    missing = [row.stored for row in layout.fields if fields[row.name] is REQUIRED]
    if missing:
        raise CheckpointFormatError(f"config.json lacks {missing}; a {layout.title} drafter must state them")
    per_slot, concatenated = fields.pop("fc_norm"), fields.pop("norm_before_fc")
    if per_slot and concatenated:
        raise CheckpointFormatError("config.json sets both fc_norm and norm_before_fc; a drafter has one or none")
    fields["aux_norm"] = "per_slot" if per_slot else "concatenated" if concatenated else "none"
    if fields["norm_before_residual"] is None:
        fields["norm_before_residual"] = layout.norm_before_residual
    fields["sliding_window"] = _read_window(layout, config, num_layers)
    layer_type = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
    fields["rope_parameters"] = _read_rope(config, layout.layer_config, layer_type)
    fields["aux_layers"], _ = read_layer_ids(layout, config)
    return fields


def read_target(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """The target as a file names it, as metadata; empty if it does not name one in a line."""
    target = get_path(config, layout.target_model) or get_path(config, TARGET_MODEL)
    if isinstance(target, str):
        target = {"name_or_path": target, "architectures": []}
    name = get_path(target, "name_or_path")
    is_name = isinstance(name, str) and name and name.isprintable()  # names are shown in terminals
    return {TARGET_MODEL: dict(target)} if is_name else {}


def _read_field(row: Field, config: Mapping[str, Any]) -> Any:
    """What is stated in the first of its places; the others may repeat it."""
    places = (row.stored, *row.also)
    stated = {path: value for path in places if (value := get_path(config, path)) is not None}
    value = next(iter(stated.values()), row.default)
    repeated = f"eagle_config.{row.name}"
    if row.name not in _OF_ANOTHER and (again := get_path(config, repeated)) is not None:
        stated[repeated] = again
    differing = [other for other in stated.values() if other is not value and other != value]
    if differing and row.name != "hidden_act":  # Gemma's two name two functions
        listed = ", ".join(f"{path} {shown(value)}" for path, value in stated.items())
        raise CheckpointFormatError(
            f"config.json contradicts itself: {listed}"
            + ("" if set(stated) & set(places) else f", where {row.stored} is read and missing")
            + "; keep the one the drafter was trained with"
        )
    return value


def _check_layers(layout: Layout, config: Mapping[str, Any]) -> None:
    model_type = get_path(config, f"{layout.layer_config}model_type")
    if layout.layer_config and model_type not in ("llama", "qwen3", None):
        raise CheckpointFormatError(
            f"config.json: {layout.layer_config}model_type is {shown(model_type)}; only 'llama' and 'qwen3' can be read"
        )


def _read_window(layout: Layout, config: Mapping[str, Any], num_layers: int) -> int | None:
    """Positions the drafter's layers see back; `None`: all of them.

    As transformers and vLLM read it: where layers are named by type, only "sliding_attention" has the window, and where
    `use_sliding_window` is false none has. Types beyond the drafter's own layers are its target's.
    """
    if layout.ignores_the_rest:
        return None
    window, switched_on, full_below = (
        get_path(config, layout.layer_config + key)
        for key in ("sliding_window", "use_sliding_window", "max_window_layers")
    )
    types = _own_layer_types(layout, config, num_layers)
    if types is None or window is None or switched_on is False:
        window = None
    kinds = set(map(str, types or ()))
    if not kinds <= _ATTENTION_TYPES or len(kinds) > 1:
        raise CheckpointFormatError(
            f"config.json: layer_types is {shown(types)}; wanted all full_attention or all sliding_attention: the "
            "drafter's layers share one mask"
        )
    if "sliding_attention" in kinds and window is None:
        raise CheckpointFormatError("config.json names sliding_attention layers, and no sliding_window they could have")
    # Qwen names no types: its first layers see everything.
    is_full = not kinds and switched_on is True and type(full_below) is int and full_below >= num_layers
    return None if is_full or "full_attention" in kinds else window


def _own_layer_types(layout: Layout, config: Mapping[str, Any], num_layers: int) -> list[Any] | None:
    """The types of the drafter's own layers, none if there is no list; `None`: the list is another network's.

    A trainer whose layers differ by type builds as many as it says. Where the file holds fewer, or a first layer that
    would be no attention, all of it was copied from the target.
    """
    layers, types = (get_path(config, layout.layer_config + key) for key in ("num_hidden_layers", "layer_types"))
    if not isinstance(types, list):
        return []
    kinds = set(map(str, types))
    built_fewer = type(layers) is int and layers > num_layers and len(kinds) > 1
    no_attention = len(types) > num_layers and not set(map(str, types[:num_layers])) <= _ATTENTION_TYPES
    return None if built_fewer or no_attention else types[:num_layers]


def read_layer_ids(layout: Layout, config: Mapping[str, Any]) -> tuple[list[int] | None, dict[str, list[int]]]:
    """The ids of the target's layers as `hs` indices, and as they are stored, by dotted path."""
    for path in LAYER_ID_PLACES:  # also where this layout has none: engines look there
        ids = get_path(config, path)
        if ids and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise CheckpointFormatError(
                f"config.json: {path} is {shown(ids)}; wanted a list of layer ids, none negative"
            )
    places = dict((*layout.layer_ids, *OTHER_LAYER_IDS))
    stored: dict[str, list[int]] = {path: ids for path in places if (ids := get_path(config, path))}
    meanings = {path: to_hs_indices(ids, places[path]) for path, ids in stored.items()}
    distinct = {tuple(ids) for ids in meanings.values()}
    if len(distinct) > 1:
        raise CheckpointFormatError(
            f"config.json names different target layers in two places: {shown(stored)} mean hidden states "
            f"{shown(meanings)}; keep the one the drafter was trained with"
        )
    return (list(distinct.pop()) if distinct else None), stored


def write_config_fields(layout: Layout, config: Eagle31Config, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` in this layout of a drafter that it can express, without the dtype.

    Args:
        metadata: `{TARGET_MODEL: {"name_or_path", "architectures"}}`, or nothing.
    """
    written: dict[str, Any] = {"architectures": [layout.architecture]}
    for path, value in layout.constants.items():
        set_path(written, path, copy.deepcopy(value))
    if TARGET_MODEL in metadata:
        set_path(written, layout.target_model, copy.deepcopy(metadata[TARGET_MODEL]))
    values = {**config.to_dict(), "fc_norm": config.aux_norm == "per_slot"}
    values["norm_before_fc"] = config.aux_norm == "concatenated"
    if not config.own_lm_head and not config.has_reduced_vocabulary:
        values["draft_vocab_size"] = None  # by which SGLang takes the target's head
    for row in layout.fields:
        if row.fact not in (layout.lacks or ()):
            set_path(written, row.stored, values[row.name])
    rope = config.rope_parameters or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    set_path(written, f"{layout.layer_config}rope_parameters", dict(rope))  # both forms: every loader finds one
    set_path(written, f"{layout.layer_config}rope_theta", rope["rope_theta"])
    set_path(written, f"{layout.layer_config}rope_scaling", None if scaling == {"rope_type": "default"} else scaling)
    if config.sliding_window is not None:
        set_path(written, f"{layout.layer_config}sliding_window", config.sliding_window)
        # Where layers are not named by type, not every engine takes the window.
        set_path(written, f"{layout.layer_config}layer_types", ["sliding_attention"] * config.num_hidden_layers)
    if layout.layer_config:
        set_path(written, f"{layout.layer_config}model_type", "qwen3" if config.qk_norm else "llama")
    if config.aux_layers is not None:
        set_path(written, LAYER_IDS, list(config.aux_layers))
        # vLLM takes the first list; SGLang looks here, and reads it by a rule of its own.
        if not layout.layer_config and (ids := sglang_indices(config.aux_layers)) is not None:
            set_path(written, NESTED_LAYER_IDS, ids)
    return written


# ---------------------------------------------------------------- rotary settings
# They stand in `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it, once for all layers or
# once for each type of layer, and some of them beside the object instead of in it.

_LLAMA_ROPE_THETA = 10000.0  # SafeAILab's 8B head states none and was trained with Llama's default

# What some rope type of transformers takes. What another type than the stated one takes is passed over, as there.
_ROPE_SETTINGS = {
    "rope_type", "type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "short_factor", "long_factor",
}  # fmt: skip
# Text has the same position on all three axes, so sections rotate as one. HunYuan's alpha: AngelSlim, which writes it
# beside a dynamic type, trains without it.
_ROPE_WITHOUT_EFFECT = {"mrope_section", "mrope_interleaved", "alpha"}
_ROPE_TYPE_NAMES = {"mrope": "default", "su": "longrope"}  # as transformers renames them
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


def _read_rope(config: Mapping[str, Any], prefix: str, layer_type: str) -> dict[str, Any]:
    """The rotary settings of layers of this type, as `Eagle31Config.rope_parameters` has them.

    Args:
        prefix: dotted path before the fields of the layers. layer_type: `"full_attention"` or `"sliding_attention"`.
    """
    new, legacy = (get_path(config, prefix + key) for key in ("rope_parameters", "rope_scaling"))
    if not all(part is None or isinstance(part, Mapping) for part in (new, legacy)):
        raise CheckpointFormatError(f"config.json: rope is {shown(new or legacy)}; wanted an object with a rope_type")
    new, legacy = (_rope_of_layer(part or {}, layer_type) for part in (new, legacy))
    if new and legacy and _rope_type_of(new) != _rope_type_of(legacy):
        raise CheckpointFormatError(
            f"config.json: rope_parameters is of type {shown(_rope_type_of(new))}, rope_scaling of type "
            f"{shown(_rope_type_of(legacy))}; keep the one the drafter was trained with"
        )
    # transformers 5 keeps everything in rope_parameters; a legacy rope_theta beside it may be a class default.
    rope = {key: value for key, value in (new or legacy).items() if key not in _ROPE_WITHOUT_EFFECT}
    unknown = sorted(map(str, rope.keys() - _ROPE_SETTINGS))
    if unknown:
        raise CheckpointFormatError(
            f"config.json: its rope settings have {', '.join(map(shown, unknown))}, which nothing here computes; a "
            "drafter with such rotations cannot be read"
        )
    rope["rope_type"] = _rope_type_of(rope)
    rope.pop("type", None)
    _take_from_beside(rope, config, prefix)
    stated = (rope.get("rope_theta"), get_path(config, f"{prefix}rope_theta"))
    rope["rope_theta"] = next((theta for theta in stated if theta is not None), _LLAMA_ROPE_THETA)
    return rope


def _rope_type_of(rope: Mapping[str, Any]) -> Any:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return _ROPE_TYPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind


def _rope_of_layer(rope: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """The settings for layers of one type, where each type has its own."""
    by_type = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    if not by_type:
        return rope
    shared = {key: value for key, value in rope.items() if key not in by_type and value is not None}
    if layer_type in by_type:
        return {**shared, **by_type[layer_type]}
    choices = list(by_type.values())
    if any(choice != choices[0] for choice in choices):
        raise CheckpointFormatError(
            f"config.json has rope settings for {', '.join(map(shown, by_type))}, but none for {layer_type}, which the "
            "drafter's layers are; keep the ones it was trained with, without a layer type around them"
        )
    return {**shared, **choices[0]}


def _take_from_beside(rope: dict[str, Any], config: Mapping[str, Any], prefix: str) -> None:
    """Settings that stand beside the object: Phi's original length, and the part of a head that is turned."""
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        value = get_path(config, prefix + key)
        if value is None or (key.startswith("original") and rope["rope_type"] not in _WITH_ORIGINAL_LENGTH):
            continue
        if rope.get(key) not in (None, value):
            raise CheckpointFormatError(
                f"config.json: {key} is {shown(value)}, and {shown(rope[key])} in its rope settings; keep the one the "
                "drafter was trained with"
            )
        rope[key] = value


# ---------------------------------------------------------------- fields that change the drafter


def harmless_values(config: Eagle31Config) -> dict[str, tuple[Any, ...]]:
    """Of each field that changes what a drafter computes, by its dotted name: the values with which the drafter is the
    one this package computes. `null` always is one."""
    width, theta = config.head_dim or 1, (config.rope_parameters or {}).get("rope_theta") or 0
    rows: tuple[tuple[str, tuple[Any, ...]], ...] = (
        # scores and states that are scaled or capped: Granite, Cohere, Gemma, OLMo
        ("logit_scale logits_scaling embedding_multiplier residual_multiplier", (1,)),
        ("attention_multiplier softmax_scale", (width**-0.5,)),
        ("final_logit_softcapping attn_logit_softcapping clip_qkv llama_4_scaling", ()),
        # other rotations, or none: GLM, GPT-NeoX, MiniMax, Gemma 3, Llama 4, SmolLM3, HunYuan, Kimi K3
        ("query_pre_attn_scalar rotary_dim", (width,)),
        ("rotary_pct rope_ratio rope_alpha no_rope_layers", (1,)),
        ("rope_base rotary_base rotary_emb_base rope_local_base_freq", (theta,)),
        ("rope_interleave rope_interleaved", (config.is_latent,)),  # latent attention turns neighbours as a pair
        ("position_embedding_type", ("rope", "rotary")),
        # other attention, another order of parts: Llama 4, Mistral 3, embedding models, HunYuan
        ("attention_chunk_size", (0,)),
        ("norm_type", ("rms", "rmsnorm", "RMSNorm", "rms_norm")),
        ("eagle_config.parallel_draft_step", (0, 1)),
        ("use_rope use_rotary_pos_emb is_causal", (True,)),
        ("eagle_config.use_input_layernorm_in_first_layer eagle_config.use_last_layernorm", (True,)),
        ("mla_use_nope attn_temperature_tuning use_bidirectional_attention use_cla parallel_attn", (False, 0)),
        ("use_parallel_residual eagle_config.use_mtp_layernorm", (False, 0)),
    )
    values = {name: harmless for names, harmless in rows for name in names.split()}
    if config.sliding_window is None:
        del values["rope_local_base_freq"]  # of layers with a window
    return values


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    if isinstance(value, float):
        return any(isinstance(each, int | float) and math.isclose(value, each, rel_tol=1e-6) for each in harmless)
    return value in harmless


def refuse_unread_fields(layout: Layout, stored: Mapping[str, Any], config: Eagle31Config) -> None:
    """Raise a `CheckpointFormatError` if `stored` (`config.json`) asks for another network than `config` tells of."""
    if layout.ignores_the_rest:
        return
    for name, harmless in harmless_values(config).items():
        value = get_path(stored, name if "." in name else layout.layer_config + name)
        is_by_layer = name == "no_rope_layers" and isinstance(value, list)
        by_layer = value[: config.num_hidden_layers] if is_by_layer else [value]
        if value is not None and not all(_is_one_of(each, harmless) for each in by_layer):
            raise CheckpointFormatError(
                f"config.json: {name} is {shown(value)}, which changes what a drafter computes and is not computed "
                "here; such a drafter cannot be read. If it is left from the target's config and the drafter was "
                "trained without it, remove it"
            )
