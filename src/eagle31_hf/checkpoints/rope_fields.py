"""Rotary settings of a drafter's `config.json`, in every form they are written in, and back.

They stand in `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it, once for all layers or
once for each type of layer, and some of them beside the object instead of in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointFormatError
from .json_files import get_path, set_path, shown

LLAMA_ROPE_THETA = 10000.0  # SafeAILab's 8B head states none and was trained with Llama's default
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
             "partial_rotary_factor")  # fmt: skip
"""What `read_rope` reads, beside a prefix."""

# What some rope type of transformers takes. What another type than the stated one takes is passed over, as there.
_SETTINGS = {
    "rope_type", "type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "short_factor", "long_factor",
}  # fmt: skip
# Text has the same position on all three axes, so sections rotate as one. HunYuan's alpha: AngelSlim, which writes it
# beside a dynamic type, trains without it.
_WITHOUT_EFFECT = {"mrope_section", "mrope_interleaved", "alpha"}
_OTHER_NAMES = {"mrope": "default", "su": "longrope"}  # as transformers renames them
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


def read_rope(config: Mapping[str, Any], prefix: str, layer_type: str) -> dict[str, Any]:
    """The rotary settings of layers of this type, as `Eagle31Config.rope_parameters` has them.

    Args:
        prefix: dotted path before the fields of the layers. layer_type: `"full_attention"` or `"sliding_attention"`.

    Raises:
        CheckpointFormatError: settings that are none, that contradict each other, or that nothing here computes.
    """
    new, legacy = (get_path(config, prefix + key) for key in ("rope_parameters", "rope_scaling"))
    if not all(part is None or isinstance(part, Mapping) for part in (new, legacy)):
        raise CheckpointFormatError(f"config.json: rope is {shown(new or legacy)}; wanted an object with a rope_type")
    new, legacy = (_of_type(part or {}, layer_type) for part in (new, legacy))
    if new and legacy and _type_of(new) != _type_of(legacy):
        raise CheckpointFormatError(
            f"config.json: rope_parameters is of type {shown(_type_of(new))}, rope_scaling of type "
            f"{shown(_type_of(legacy))}; keep the one the drafter was trained with"
        )
    # transformers 5 keeps everything in rope_parameters; a legacy rope_theta beside it may be a class default.
    rope = {key: value for key, value in (new or legacy).items() if key not in _WITHOUT_EFFECT}
    unknown = sorted(map(str, rope.keys() - _SETTINGS))
    if unknown:
        raise CheckpointFormatError(
            f"config.json: its rope settings have {', '.join(map(shown, unknown))}, which nothing here computes; a "
            "drafter with such rotations cannot be read"
        )
    rope["rope_type"] = _type_of(rope)
    rope.pop("type", None)
    _take_from_beside(rope, config, prefix)
    rope["rope_theta"] = _theta(rope, config, prefix)
    return rope


def write_rope(written: dict[str, Any], rope: Mapping[str, Any], prefix: str) -> None:
    """Both forms, which every loader finds one of."""
    legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
    set_path(written, f"{prefix}rope_parameters", dict(rope))
    set_path(written, f"{prefix}rope_theta", rope["rope_theta"])
    set_path(written, f"{prefix}rope_scaling", None if legacy == {"rope_type": "default"} else legacy)


def _type_of(rope: Mapping[str, Any]) -> Any:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind


def _of_type(rope: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
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


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> float:
    stated = (rope.get("rope_theta"), get_path(config, f"{prefix}rope_theta"))
    theta = next((value for value in stated if value is not None), LLAMA_ROPE_THETA)
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise CheckpointFormatError(f"config.json: rope_theta is {shown(theta)}; wanted a number above 0")
    return float(theta)
