"""Drafter checkpoints: find, recognise, read, write and inspect every published EAGLE-3 / EAGLE 3.1 layout.

A checkpoint is checked from its headers before any tensor is loaded, and either read whole or refused. Nothing in a
file is ever executed: safetensors first, `.bin` only through weights-only unpickling, `auto_map` ignored.
The layouts are described in `docs/formats.md`; their tables live in `checkpoints.layouts`.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from ..config import Eagle31Config, MtpConfig
from ..errors import CheckpointFormatError, ConfigurationError, config_problem
from .checks import (
    INTEGERS,
    check_rope,
    check_tensors,
    check_values,
    check_vocabulary_map,
    refuse_other_methods,
)
from .config_json import (
    TARGET_MODEL,
    read_config_fields,
    read_layer_ids,
    read_target,
    refuse_unread_fields,
    write_config_fields,
)
from .files import CONFIG_FILE, FLOATS, StoredTensors, dtype_name, open_tensors, read_json, replace_checkpoint
from .hub import resolve_checkpoint
from .layouts import (
    LATENT_SIZES,
    Layout,
    canonical_name,
    check_expressible,
    detect_layout,
    stored_name,
    written_layout,
)
from .mtp import TOKENIZER_FILE, find_head, refuse_lost_head


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's weights under canonical names.

    Args:
        config: what the weights are.
        tensors: canonical name to tensor, see `eagle_network`; `d2t` is int64 `[Vd]` offsets, present iff `Vd < V`.
        format: name of the layout it was read from, one of `FORMATS`.
        metadata: `{"target_model": {"name_or_path", "architectures"}}` where its `config.json` names its target.
    """

    config: Eagle31Config
    tensors: dict[str, Tensor]
    format: str = "plain"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The target that `metadata` names; empty where it names none."""
        return str(self.metadata.get(TARGET_MODEL, {}).get("name_or_path", ""))


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint understood and checked, from its headers and config alone: no tensor is loaded.

    Attributes:
        stored: its tensors. names: our names of those that are read, and the stored ones; `t2d` included.
        aux_layers_as_stored: the layer ids as written, by place; `config.aux_layers` holds them as `hs` indices.
        unpack: tensors by our names, as they are stored, to those of the network.
    """

    source: str
    format: str
    format_title: str
    method: str
    config: Eagle31Config
    stored: StoredTensors
    names: dict[str, str]
    aux_layers_as_stored: dict[str, list[int]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    unpack: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict

    @property
    def dtype(self) -> str:
        """What floats are stored in."""
        return dtype_name(self.stored.headers[self.names["fc.weight"]])

    @property
    def parameters(self) -> int:
        """Elements of float tensors."""
        return sum(tensor.numel() for tensor in self.stored.headers.values() if tensor.dtype in FLOATS)

    @property
    def stored_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.stored.headers.values())

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Stored names to shapes."""
        return {name: tuple(tensor.shape) for name, tensor in self.stored.headers.items()}

    @property
    def target(self) -> str:
        """The name of the model it is for, empty where the files do not say."""
        return str(self.metadata.get(TARGET_MODEL, {}).get("name_or_path", ""))

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-ready values, the configuration's beside the file's."""
        of_file = ("source", "format", "format_title", "method", "dtype", "parameters", "stored_bytes",
                   "aux_layers_as_stored", "target")  # fmt: skip
        return {
            **self.config.to_dict(),
            **{fact: getattr(self, fact) for fact in of_file},
            "tensors": {name: list(shape) for name, shape in self.tensors.items()},
        }


def read_checkpoint(
    path_or_id: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
) -> Checkpoint:
    """Reads a drafter from a folder or Hub id, whichever published layout it is in.

    Args:
        dtype: float dtype of the weights; `None` keeps the stored one.
        options: `revision`, `token`, `cache_dir`, `local_files_only` as in `huggingface_hub`.

    Raises:
        CheckpointNotFoundError: no such folder or id, no access, or no network.
        CheckpointFormatError: not an EAGLE-3 / 3.1 drafter, incomplete, damaged or contradictory.
        UnsafeCheckpointError: a pickle that would run code; nothing was run.
    """
    summary = inspect_checkpoint(path_or_id, **options)
    loaded = summary.stored.load(summary.names.values())
    tensors = summary.unpack({ours: loaded.pop(theirs) for ours, theirs in summary.names.items()})
    _check_loaded(summary.config, tensors)
    tensors = {  # nebius stores d2t as int32
        name: tensor.long() if name == "d2t" else tensor.to(dtype or tensor.dtype)
        for name, tensor in tensors.items()
        if name != "t2d"
    }
    summary.config.dtype = tensors["fc.weight"].dtype
    return Checkpoint(summary.config, tensors, summary.format, summary.metadata)


def inspect_checkpoint(path_or_id: str | os.PathLike[str], **options: Any) -> CheckpointSummary:
    """What a checkpoint holds, from its headers and config only; options and errors as in `read_checkpoint`.

    Values (NaN, the vocabulary map) are not looked at.
    """
    folder = resolve_checkpoint(path_or_id, **options)
    if (head := find_head(folder)) is not None:
        tokenizer = {"tokenizer_file": str(folder / TOKENIZER_FILE)} if (folder / TOKENIZER_FILE).is_file() else {}
        config = head.config()
        title = "a folder of its own" if head.family is None else f"inside its target ({config.family})"
        return CheckpointSummary(
            str(path_or_id), "mtp", title, "MTP head", config, head.stored, head.names, metadata=tokenizer,
            unpack=head.unpack,
        )  # fmt: skip
    try:
        return _read_headers(folder, str(path_or_id))
    except CheckpointFormatError:
        refuse_lost_head(folder)  # of a target that has lost its head, that is said instead of what it is
        raise


def write_checkpoint(checkpoint: Checkpoint, folder: str | os.PathLike[str], *, format: str = "plain") -> None:
    """Writes `config.json` and `model.safetensors` of a drafter in one of `WRITTEN_FORMATS`.

    `"plain"` is the layout that vLLM and both SGLang generations read wherever they can run the drafter at all.
    `folder` at every moment holds its old checkpoint, none that can be read, or the new one.

    Raises:
        ConfigurationError: no such format, or it cannot express this drafter; the message says which can.
        CheckpointFormatError: the tensors do not fit the config.
        CheckpointError: it cannot be written there; what was there stays.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    if isinstance(config, MtpConfig):
        if format != "mtp":
            raise ConfigurationError(f"an MTP head cannot be written as {format}; its layout is mtp")
        _check_loaded(config, tensors)
        fields = {**config.to_dict(), "architectures": ["MtpDrafter"]}
        fields["dtype"] = dtype_name(tensors["fc.weight"])
        return replace_checkpoint(Path(folder), fields, tensors)
    layout = written_layout(format)
    check_expressible(layout, config)
    _check_shapes(tensors, config)
    _check_loaded(config, tensors)
    written = write_config_fields(layout, config, checkpoint.metadata)
    written["torch_dtype"] = dtype_name(tensors["fc.weight"])
    stored = {stored_name(layout, name): tensor for name, tensor in tensors.items()}
    if "d2t" in stored:
        stored["d2t"] = stored["d2t"].cpu().long()
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)  # true for what a draft row stands for
        stored["t2d"][stored["d2t"] + torch.arange(len(stored["d2t"]))] = True
    replace_checkpoint(Path(folder), written, stored)


# ---------------------------------------------------------------- reading, step by step


def _read_headers(folder: Path, source: str) -> CheckpointSummary:
    raw_config = read_json(folder / CONFIG_FILE)
    _check_sections(raw_config)
    stored = open_tensors(folder)
    refuse_other_methods(raw_config, stored.headers)
    layout = detect_layout(raw_config, stored.headers)
    names = _canonical_names(stored.headers)
    headers = {ours: stored.headers[theirs] for ours, theirs in names.items()}
    try:
        fields = read_config_fields(layout, raw_config, _count_layers(headers))
        config = Eagle31Config(**_completed_fields(layout, fields, raw_config, headers))
        refuse_unread_fields(layout, raw_config, config)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        if isinstance(error, CheckpointFormatError):
            raise
        raise _impossible(error) from error
    if not config.has_reduced_vocabulary:
        # A full vocabulary needs no map. Some writers keep an identity map: checked, then dropped.
        theirs = names.get("d2t")
        if theirs and (headers["d2t"].dtype not in INTEGERS or stored.load([theirs])[theirs].any()):
            raise CheckpointFormatError(
                "d2t is present though the draft vocabulary is the whole vocabulary, and it is no identity map (all "
                "zeros); state the reduced draft_vocab_size, or remove d2t and t2d"
            )
        names = {ours: theirs for ours, theirs in names.items() if ours not in ("d2t", "t2d")}
    check_rope(config)
    _check_shapes({ours: headers[ours] for ours in names}, config)
    return CheckpointSummary(
        source,
        layout.name,
        layout.title,
        "EAGLE 3.1" if config.is_eagle31 else "EAGLE-3",
        config,
        stored,
        names,
        read_layer_ids(layout, raw_config)[1],
        read_target(layout, raw_config),
    )


def _check_sections(raw_config: Mapping[str, Any]) -> None:
    sections = ("eagle_config", "transformer_layer_config", "speculators_config", "quantization_config")
    wrong = [name for name in sections if not isinstance(raw_config.get(name, {}), dict | None)]
    if not isinstance(raw_config.get("architectures") or [], list):
        wrong.append("architectures")
    if wrong:
        raise CheckpointFormatError(
            f"config.json: {', '.join(wrong)} is of the wrong kind (sections are objects, architectures is a list); "
            "correct it or fetch the checkpoint again"
        )


def _canonical_names(stored: Iterable[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for theirs in stored:
        ours = canonical_name(theirs)
        if ours in names:
            raise CheckpointFormatError(f"{names[ours]} and {theirs} are both {ours}; remove the wrong one")
        if ours is not None:
            names[ours] = theirs
    return names


def _count_layers(names: Iterable[str]) -> int:
    """Decoder layers among canonical names; 1 at least, whose missing tensors are listed later."""
    return max(1, len({match[1] for name in names if (match := re.match(r"layers\.(\d+)\.", name))}))


def _completed_fields(
    layout: Layout, fields: dict[str, Any], raw_config: Mapping[str, Any], infos: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Fields from the table, completed and corrected by what the tensors themselves show."""
    fields["num_hidden_layers"] = _count_layers(infos)
    fields["own_embedding"] = "embed_tokens.weight" in infos
    fields["own_lm_head"] = "lm_head.weight" in infos
    fields["fc_bias"] = "fc.bias" in infos
    layer_type = (raw_config.get("transformer_layer_config") or {}).get("model_type")
    fields["qk_norm"] = layer_type == "qwen3" or "layers.0.self_attn.q_norm.weight" in infos
    if fields["draft_vocab_size"] is None and "d2t" in infos:
        fields["draft_vocab_size"] = infos["d2t"].shape[0] if infos["d2t"].shape else None
    if fields.get("num_aux_hidden_states") is None:
        fields["num_aux_hidden_states"] = len(fields["aux_layers"] or ()) or 3
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" not in infos:
        fields |= dict.fromkeys(LATENT_SIZES)  # the target's
    elif fields["kv_lora_rank"] is None:
        raise CheckpointFormatError("config.json lacks kv_lora_rank; a drafter with latent attention must state it")
    elif layout.ignores_the_rest:
        fields["rope_parameters"] = _rope_of_nemo(fields)
    if fields["head_dim"] is None:
        fields["head_dim"] = _head_dim_of(infos, fields["num_attention_heads"])
    if raw_config.get("tie_word_embeddings") and fields["own_embedding"] and not fields["own_lm_head"]:
        raise CheckpointFormatError(
            "config.json ties the draft head to the drafter's own embedding; such a drafter cannot be read. Store the "
            "head as lm_head.weight"
        )
    return fields


def _rope_of_nemo(fields: dict[str, Any]) -> dict[str, Any]:
    """NeMo's latent attention takes YaRN's frequencies alone, scaling neither tables nor scores, and only if all of
    YaRN's settings are stated and the drafter is for longer texts than the original ones."""
    rope: dict[str, Any] = fields["rope_parameters"]
    needed = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    stated = {name: rope.get(name) for name in needed}
    are_numbers = all(type(value) in (int, float) for value in stated.values())
    if are_numbers and fields["max_position_embeddings"] > stated["original_max_position_embeddings"]:
        return {"rope_type": "yarn", "rope_theta": rope["rope_theta"], **stated, "attention_factor": 1.0}
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def _head_dim_of(infos: Mapping[str, Tensor], num_heads: Any) -> int | None:
    query = infos.get("layers.0.self_attn.q_proj.weight")
    if query is None or not query.shape or not isinstance(num_heads, int) or num_heads < 1:
        return None
    return query.shape[0] // num_heads


def _check_shapes(tensors: Mapping[str, Tensor], config: Eagle31Config) -> None:
    from .eagle_network import expected_shapes  # which takes a second to import

    try:
        wanted = expected_shapes(config)
    except Exception as error:  # no tensor can be so large
        raise _impossible(error) from error
    if "d2t" in wanted and "t2d" in tensors:
        wanted["t2d"] = (config.vocab_size,)
    check_tensors(tensors, wanted)


def _impossible(error: Exception) -> CheckpointFormatError:
    reason = textwrap.shorten(config_problem(error), 400, placeholder=" …")
    return CheckpointFormatError(f"config.json describes no possible drafter: {reason}")


def _check_loaded(config: Eagle31Config, tensors: Mapping[str, Tensor]) -> None:
    check_values(tensors)
    if "d2t" in tensors:
        check_vocabulary_map(tensors["d2t"].cpu(), tensors.get("t2d"), config.vocab_size)
