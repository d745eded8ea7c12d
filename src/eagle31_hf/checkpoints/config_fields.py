"""`config.json` of any drafter format to `Eagle31Config` fields and back, by the tables of `formats`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..configuration_eagle31 import Eagle31Config
from ..errors import CheckpointFormatError, ConfigurationError
from .formats import (
    LLAMA_ROPE_THETA,
    REQUIRED,
    Format,
    check_expressible,
    from_hs_indices,
    has_reduced_vocabulary,
    to_hs_indices,
)

# Keys that are someone's marker or say how a file came to be: they would mislead in another format.
_MARKERS = {
    "speculators": ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config",
                    "embed_requires_grad"),
    "torchspec": ("_torchspec_version",),
    "modelopt": ("eagle_config",),
}  # fmt: skip
_NOT_KEPT = ("architectures", "auto_map", "dtype", "model_type", "tie_word_embeddings", "torch_dtype",
             "transformers_version", "_name_or_path", "rope_theta", "rope_scaling", "rope_parameters",
             "quantization_config")  # fmt: skip


@dataclass(frozen=True)
class StoredConfig:
    """A `config.json` read through a format's table. `layer_ids` are as stored, by dotted path."""

    fields: dict[str, Any]
    layer_ids: dict[str, list[int]]
    metadata: dict[str, Any]


def get_path(config: Mapping[str, Any], path: str) -> Any:
    """The entry at a dotted path, `None` if any part of it is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def _drop_path(config: dict[str, Any], path: str) -> None:
    head, _, rest = path.partition(".")
    if rest and isinstance(config.get(head), dict):
        _drop_path(config[head], rest)
        if not config[head]:
            del config[head]
    elif not rest:
        config.pop(head, None)


def read_config_fields(table: Format, config: Mapping[str, Any]) -> StoredConfig:
    """`config.json` as `Eagle31Config` fields, layer ids as `hs` indices; what the table does not know is metadata.

    Raises:
        CheckpointFormatError: a required entry is missing, two contradict, or one states another network.
    """
    _check_demands(table, config)
    fields: dict[str, Any] = {}
    for row in table.fields:
        found = [value for path in row.paths if (value := get_path(config, path)) is not None]
        fields[row.name] = found[0] if found else row.default
    missing = [row.stored for row in table.fields if fields[row.name] is REQUIRED]
    if missing:
        raise CheckpointFormatError(f"config.json lacks {missing}; a {table.title} drafter must state them")
    per_slot, concatenated = fields.pop("fc_norm"), fields.pop("norm_before_fc")
    if per_slot and concatenated:
        raise CheckpointFormatError("config.json sets both fc_norm and norm_before_fc; a drafter has one or none")
    fields["aux_norm"] = "per_slot" if per_slot else "concatenated" if concatenated else "none"
    fields["rope_parameters"] = _read_rope(config, table.layer_config)
    fields["aux_layers"], stored_ids = _read_layer_ids(table, config)
    return StoredConfig(fields, stored_ids, _read_metadata(table, config))


def _check_demands(table: Format, config: Mapping[str, Any]) -> None:
    for path, wanted in table.demands.items():
        if get_path(config, path) not in (wanted, None):
            raise CheckpointFormatError(
                f"config.json: {path} is {get_path(config, path)}; only drafters with {wanted} can be read, "
                "this one has another network"
            )
    model_type = get_path(config, f"{table.layer_config}model_type")
    if table.layer_config and model_type not in ("llama", "qwen3", None):
        raise CheckpointFormatError(
            f"config.json: {table.layer_config}model_type is {model_type!r}; only 'llama' and 'qwen3' can be read"
        )


def _read_layer_ids(table: Format, config: Mapping[str, Any]) -> tuple[list[int] | None, dict[str, list[int]]]:
    stored: dict[str, list[int]] = {}
    meanings: dict[str, list[int]] = {}
    for path, convention in table.layer_ids:
        ids = get_path(config, path)
        if not ids:
            continue
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise CheckpointFormatError(f"config.json: {path} is {ids!r}; wanted a list of layer ids, none negative")
        stored[path], meanings[path] = ids, to_hs_indices(ids, convention)
    distinct = {tuple(ids) for ids in meanings.values()}
    if len(distinct) > 1:
        raise CheckpointFormatError(
            f"config.json names different target layers in two places: {stored} mean hidden states {meanings}; "
            "keep the one the drafter was trained with"
        )
    return (list(distinct.pop()) if distinct else None), stored


def _read_rope(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    # transformers 5 keeps everything in rope_parameters; a legacy rope_theta beside it may be a class default.
    new, legacy = (get_path(config, prefix + key) for key in ("rope_parameters", "rope_scaling"))
    if not all(part is None or isinstance(part, Mapping) for part in (new, legacy)):
        raise CheckpointFormatError(f"config.json: rope is {new or legacy!r}; wanted an object with a rope_type")
    rope = dict(new or legacy or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope.get("rope_theta") is None:
        theta = get_path(config, f"{prefix}rope_theta")
        rope["rope_theta"] = LLAMA_ROPE_THETA if theta is None else theta
    if type(rope["rope_theta"]) not in (int, float):
        raise CheckpointFormatError(f"config.json: rope_theta is {rope['rope_theta']!r}; wanted a number")
    rope["rope_theta"] = float(rope["rope_theta"])
    return rope


def _read_metadata(table: Format, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata = copy.deepcopy(dict(config))
    known = [path for row in table.fields for path in row.paths] + [path for path, _ in table.layer_ids]
    known += [table.layer_config + key for key in _NOT_KEPT] + list(_NOT_KEPT) + list(table.demands)
    known.append("eagle_config.use_aux_hidden_state")  # false is refused long before, true says nothing new
    # Constants that say nothing new are written again anyway.
    known += [path for path, value in table.constants.items() if get_path(config, path) == value]
    for path in known:
        _drop_path(metadata, path)
    return metadata


def write_config_fields(table: Format, config: Eagle31Config, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of `config` in this format, without the dtype.

    Raises:
        ConfigurationError: the format cannot express the drafter.
    """
    check_expressible(table, config)
    foreign = {key for name, keys in _MARKERS.items() if name != table.name for key in keys}
    written: dict[str, Any] = {}
    for path, value in {**table.constants, **table.demands}.items():
        _set_path(written, path, copy.deepcopy(value))
    _merge(written, {key: value for key, value in metadata.items() if key not in foreign})
    written["architectures"] = [table.architectures[0]]
    values = {**config.to_dict(), "fc_norm": config.aux_norm == "per_slot"}
    values["norm_before_fc"] = config.aux_norm == "concatenated"
    if not config.own_lm_head and not has_reduced_vocabulary(config):
        values["draft_vocab_size"] = None  # how SGLang is told to take the target's head
    for row in table.fields:
        _set_path(written, row.stored, values[row.name])
    _write_rope(written, config, table.layer_config)
    if table.layer_config:
        _set_path(written, f"{table.layer_config}model_type", "qwen3" if config.qk_norm else "llama")
    _write_layer_ids(table, config, written)
    return written


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def _write_rope(written: dict[str, Any], config: Eagle31Config, prefix: str) -> None:
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
    _set_path(written, f"{prefix}rope_parameters", rope)
    _set_path(written, f"{prefix}rope_theta", rope["rope_theta"])
    _set_path(written, f"{prefix}rope_scaling", None if legacy == {"rope_type": "default"} else legacy)


def _write_layer_ids(table: Format, config: Eagle31Config, written: dict[str, Any]) -> None:
    if config.aux_layers is None:
        return
    for place, (path, convention) in enumerate(table.layer_ids):
        ids = from_hs_indices(config.aux_layers, convention)
        if ids is None and place == 0:
            raise ConfigurationError(
                f"the {table.name} format stores layer ids as: {convention}; hidden states {config.aux_layers} cannot "
                "be written that way; write it as plain or speculators"
            )
        # A second place serves the other engine. Where one list is read in hs form by vLLM and the other is SGLang's,
        # only `plain` may hold both: the rest have one place of their own.
        if ids is not None and (place == 0 or table.name == "plain"):
            _set_path(written, path, ids)
