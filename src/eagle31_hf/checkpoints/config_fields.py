"""`config.json` of any drafter format to `Eagle31Config` fields and back, by the tables of `formats`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError
from .formats import (
    LAYER_ID_PLACES,
    OTHER_LAYER_IDS,
    REQUIRED,
    Field,
    Format,
    from_hs_indices,
    has_reduced_vocabulary,
    to_hs_indices,
)
from .json_files import drop_path, get_path, set_path, shown
from .rope_fields import ROPE_KEYS, read_rope, write_rope
from .unread_fields import CHANGES_THE_DRAFTER

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

# Keys that are someone's marker or say how a file came to be: they would mislead in another format.
_MARKERS = {
    "speculators": ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config",
                    "embed_requires_grad"),
    "torchspec": ("_torchspec_version",),
    "modelopt": ("eagle_config",),
}  # fmt: skip
TARGET_MODEL = "target_model"
"""Metadata that every layout can hold: `{"name_or_path", "architectures"}` of the target, see `Format.target_model`."""
_KEPT_FOR = "kept_for_formats"  # markers of other formats, by the format they came from: no loader looks there
_NOT_KEPT = ("architectures", "auto_map", "dtype", "model_type", "tie_word_embeddings", "torch_dtype",
             "transformers_version", "_name_or_path", "quantization_config", *ROPE_KEYS)  # fmt: skip
_WINDOW_KEYS = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_SIZES_OF_ANOTHER = ("num_hidden_layers", "vocab_size")  # of the target, wherever a config repeats them


@dataclass(frozen=True)
class StoredConfig:
    """A `config.json` read through a format's table. `layer_ids` are as stored, by dotted path."""

    fields: dict[str, Any]
    layer_ids: dict[str, list[int]]
    metadata: dict[str, Any]


def read_config_fields(table: Format, config: Mapping[str, Any], num_layers: int) -> StoredConfig:
    """`config.json` as `Eagle31Config` fields, layer ids as `hs` indices; what the table does not know is metadata.

    Args:
        num_layers: decoder layers among the file's tensors.

    Raises:
        CheckpointFormatError: a required entry is missing, two contradict, or one states another network.
    """
    _check_demands(table, config)
    _check_layer_ids(config)
    fields = {row.name: _read_field(row, config) for row in table.fields}
    missing = [row.stored for row in table.fields if fields[row.name] is REQUIRED]
    if missing:
        raise CheckpointFormatError(f"config.json lacks {missing}; a {table.title} drafter must state them")
    per_slot, concatenated = fields.pop("fc_norm"), fields.pop("norm_before_fc")
    if per_slot and concatenated:
        raise CheckpointFormatError("config.json sets both fc_norm and norm_before_fc; a drafter has one or none")
    fields["aux_norm"] = "per_slot" if per_slot else "concatenated" if concatenated else "none"
    fields["sliding_window"] = _read_window(table, config, num_layers)
    layer_type = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
    fields["rope_parameters"] = read_rope(config, table.layer_config, layer_type)
    fields["aux_layers"], stored_ids = _read_layer_ids(table, config)
    return StoredConfig(fields, stored_ids, _read_metadata(table, config))


def read_places(table: Format) -> list[str]:
    """Dotted paths of all that a table's format reads, apart from what it needs to be recognised."""
    places = [path for row in table.fields for path in row.paths]
    places += [path for path, _ in (*table.layer_ids, *OTHER_LAYER_IDS)]
    places += [table.layer_config + key for key in (*ROPE_KEYS, *_WINDOW_KEYS)]
    return [*places, *table.demands, table.target_model, TARGET_MODEL]


def _read_field(row: Field, config: Mapping[str, Any]) -> Any:
    """What is stated in the first of its places; the others may repeat it."""
    found = {path: value for path in row.paths if (value := get_path(config, path)) is not None}
    value = next(iter(found.values()), row.default)
    repeated = f"eagle_config.{row.name}"
    if row.name not in _SIZES_OF_ANOTHER and (again := get_path(config, repeated)) is not None:
        found[repeated] = again
    differing = [other for other in found.values() if other is not value and other != value]
    if differing and row.name != "hidden_act":  # Gemma's two name two functions
        told = ", ".join(f"{path} {shown(value)}" for path, value in found.items())
        raise CheckpointFormatError(
            f"config.json contradicts itself: {told}"
            + ("" if set(found) & set(row.paths) else f", where {row.stored} is read and missing")
            + "; keep the one the drafter was trained with"
        )
    return value


def _check_demands(table: Format, config: Mapping[str, Any]) -> None:
    for path, wanted in table.demands.items():
        if get_path(config, path) not in (wanted, None):
            raise CheckpointFormatError(
                f"config.json: {path} is {shown(get_path(config, path))}; only drafters with {wanted} can be read, "
                "this one has another network"
            )
    model_type = get_path(config, f"{table.layer_config}model_type")
    if table.layer_config and model_type not in ("llama", "qwen3", None):
        raise CheckpointFormatError(
            f"config.json: {table.layer_config}model_type is {shown(model_type)}; only 'llama' and 'qwen3' can be read"
        )


def _check_layer_ids(config: Mapping[str, Any]) -> None:
    for path in LAYER_ID_PLACES:  # also where this format has none: engines look there
        ids = get_path(config, path)
        if ids and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise CheckpointFormatError(
                f"config.json: {path} is {shown(ids)}; wanted a list of layer ids, none negative"
            )


def _read_window(table: Format, config: Mapping[str, Any], num_layers: int) -> int | None:
    """Positions the drafter's layers see back; `None`: all of them.

    As transformers and vLLM read it: where layers are named by type, only "sliding_attention" has the window, and where
    `use_sliding_window` is false none has. Types beyond the drafter's own layers are its target's.

    Raises:
        CheckpointFormatError: a window that is no number of positions, or layers that see differently far.
    """
    if table.ignores_the_rest:
        return None
    window, switched_on, full_below = (
        get_path(config, table.layer_config + key)
        for key in ("sliding_window", "use_sliding_window", "max_window_layers")
    )
    types = _own_layer_types(table, config, num_layers)
    if types is None or window is None or switched_on is False:
        window = None
    elif type(window) is not int or window < 1:
        raise CheckpointFormatError(f"config.json: sliding_window is {shown(window)}; wanted a whole number above 0")
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


def _own_layer_types(table: Format, config: Mapping[str, Any], num_layers: int) -> list[Any] | None:
    """The types of the drafter's own layers, none if there is no list; `None`: the list is another network's.

    A trainer whose layers differ by type builds as many as it says. Where the file holds fewer, or a first layer that
    would be no attention, all of it was copied from the target.
    """
    layers, types = (get_path(config, table.layer_config + key) for key in ("num_hidden_layers", "layer_types"))
    if not isinstance(types, list):
        return []
    kinds = set(map(str, types))
    built_fewer = type(layers) is int and layers > num_layers and len(kinds) > 1
    no_attention = len(types) > num_layers and not set(map(str, types[:num_layers])) <= _ATTENTION_TYPES
    return None if built_fewer or no_attention else types[:num_layers]


def _read_layer_ids(table: Format, config: Mapping[str, Any]) -> tuple[list[int] | None, dict[str, list[int]]]:
    places = dict((*table.layer_ids, *OTHER_LAYER_IDS))
    stored: dict[str, list[int]] = {path: ids for path in places if (ids := get_path(config, path))}
    meanings = {path: to_hs_indices(ids, places[path]) for path, ids in stored.items()}
    distinct = {tuple(ids) for ids in meanings.values()}
    if len(distinct) > 1:
        raise CheckpointFormatError(
            f"config.json names different target layers in two places: {shown(stored)} mean hidden states "
            f"{shown(meanings)}; keep the one the drafter was trained with"
        )
    return (list(distinct.pop()) if distinct else None), stored


def _read_metadata(table: Format, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata = copy.deepcopy(dict(config))
    known = [path for path in read_places(table) if path not in (table.target_model, TARGET_MODEL)]
    known += [table.layer_config + key for key in _NOT_KEPT] + list(_NOT_KEPT)
    # What a format's classes leave unread, another format's would read.
    known += [name if "." in name else table.layer_config + name for name in CHANGES_THE_DRAFTER]
    known.append("eagle_config.use_aux_hidden_state")  # false is refused long before, true says nothing new
    # Constants that say nothing new are written again anyway.
    known += [path for path, value in table.constants.items() if get_path(config, path) == value]
    target_model = _named_target(get_path(config, table.target_model))
    if target_model is not None:
        known.append(table.target_model)
    for path in known:
        drop_path(metadata, path)
    return metadata if target_model is None else {**metadata, TARGET_MODEL: target_model}


def _named_target(entry: Any) -> dict[str, Any] | None:
    """A target as a file names it, if it does: a `name_or_path` and more."""
    named = isinstance(entry, Mapping) and isinstance(entry.get("name_or_path"), str) and entry["name_or_path"]
    return copy.deepcopy(dict(entry)) if named else None


def write_config_fields(
    table: Format, config: Eagle31Config, metadata: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The `config.json` in this format of a drafter that it can express (`losses`), without the dtype.

    Args:
        metadata: what the checkpoint says beside the network. source: the format it was read from, whose markers are
            kept where no loader looks, and are found again when that format is written.
    """
    written: dict[str, Any] = {}
    for path, value in {**table.constants, **table.demands}.items():
        set_path(written, path, copy.deepcopy(value))
    _merge(written, _metadata_for(table, metadata, source))
    written["architectures"] = [table.architectures[0]]
    values = {**config.to_dict(), "fc_norm": config.aux_norm == "per_slot"}
    values["norm_before_fc"] = config.aux_norm == "concatenated"
    if not config.own_lm_head and not has_reduced_vocabulary(config):
        values["draft_vocab_size"] = None  # how SGLang is told to take the target's head
    for row in table.fields:
        if row.written:
            set_path(written, row.stored, values[row.name])
    write_rope(written, config.rope_parameters or {}, table.layer_config)
    if config.sliding_window is not None:
        set_path(written, f"{table.layer_config}sliding_window", config.sliding_window)
        # Where layers are not named by type, not every engine takes the window.
        set_path(written, f"{table.layer_config}layer_types", ["sliding_attention"] * config.num_hidden_layers)
    if table.layer_config:
        set_path(written, f"{table.layer_config}model_type", "qwen3" if config.qk_norm else "llama")
    _write_layer_ids(table, config, written)
    return written


def _metadata_for(table: Format, metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Metadata as this format says it: own markers where its loaders look, others' put by, the target by its path."""
    kept = _kept_markers(metadata)
    foreign = {key for name, keys in _MARKERS.items() if name != table.name for key in keys}
    foreign &= metadata.keys() if source != table.name else set()
    if foreign:
        kept[source] = {key: metadata[key] for key in metadata if key in foreign}
    said = {key: value for key, value in metadata.items() if key not in foreign | {TARGET_MODEL, _KEPT_FOR}}
    said = copy.deepcopy({**said, **kept.pop(table.name, {})})
    if kept:
        said[_KEPT_FOR] = kept
    if TARGET_MODEL in metadata:
        set_path(said, table.target_model, metadata[TARGET_MODEL])
    return said


def _kept_markers(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier conversion put by: markers and nothing else, whatever the file says."""
    stored, markers = metadata.get(_KEPT_FOR), {key for keys in _MARKERS.values() for key in keys}
    kept: dict[str, dict[str, Any]] = {}
    for name, entries in stored.items() if isinstance(stored, Mapping) else ():
        if isinstance(entries, Mapping) and (known := {key: entries[key] for key in entries if key in markers}):
            kept[name] = known
    return kept


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def _write_layer_ids(table: Format, config: Eagle31Config, written: dict[str, Any]) -> None:
    if config.aux_layers is None:
        return
    for place, (path, convention) in enumerate(table.layer_ids):
        ids = from_hs_indices(config.aux_layers, convention)
        assert ids is not None or place > 0, "find_losses names layer ids that cannot be said"
        # A second place serves the other engine. Where one list is read in hs form by vLLM and the other is SGLang's,
        # only `plain` and `mla` hold both: the rest have one place of their own.
        if ids is not None and (place == 0 or table.name in ("plain", "mla")):
            set_path(written, path, ids)
