"""Multi-token-prediction (MTP) heads that targets' checkpoints hold: which families have one, how it is stored, and how
it is read as a drafter.

transformers drops these tensors when it loads the target, so they are read from the files: only theirs, decided tensor
by tensor. `FAMILIES` says what is known of each family; conventions were checked against transformers' `MtpModel` and
are tried in `tests/drafter/test_mtp.py`. A head is read whole or refused by name.

A head may also lie in a folder of its own, in the layout `mtp`: config.json is an `MtpConfig`, tensors have our names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ..config import MtpConfig
from ..errors import CheckpointFormatError, config_problem, shown
from .files import (
    CONFIG_FILE,
    FLOATS,
    INDEX_FILE,
    WEIGHTS_FILE,
    StoredTensors,
    dtype_name,
    open_shards,
    read_index,
    read_json,
    renamed,
    shard_paths,
)

HEAD_FILE = "mtp.safetensors"
"""Where some publishers keep the head, beside an index that does not name it."""

TOKENIZER_FILE = "tokenizer.json"
"""Of a target: the order of its ids says which rows of its LM head are worth drafting from."""

_PARTS = ("fc.weight", "enorm.weight", "hnorm.weight", "norm.weight")
_PREFIX = r"(?:model\.|language_model\.)*"
_OWN = _PREFIX + r"mtp\.(.+)"
_LAST_LAYER = _PREFIX + r"layers\.{layers}\.(.+)"
_ERNIE = _PREFIX + r"((?:mtp_\w+\.0|norm)\..+)"

_NAMES: dict[str, str | None] = {
    # Qwen, Mellum, EXAONE
    "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.",
    # DeepSeek, GLM
    "eh_proj.": "fc.", "shared_head.norm.": "norm.", "enorm.": "enorm.", "hnorm.": "hnorm.",
    # Nemotron, MiMo
    "layers.0.eh_proj.": "fc.", "layers.0.enorm.": "enorm.", "layers.0.hnorm.": "hnorm.",
    "layers.0.final_layernorm.": "norm.",
    "layers.0.pre_mlp_layernorm.": "layers.0.post_attention_layernorm.",
    "layers.0.self_attn.attention_sink_bias": "layers.0.self_attn.sinks",
    # Ernie, whose norm is the target's final norm
    "mtp_linear_proj.0.": "fc.", "mtp_emb_norm.0.": "enorm.", "mtp_hidden_norm.0.": "hnorm.",
    "mtp_block.0.": "layers.0.",
}  # fmt: skip
"""How names of a head's tensors begin in some family, and what they are here. Others are ours, or a family's own."""


@dataclass(frozen=True)
class MtpFamily:
    """How one family of targets stores its head, and what the head computes.

    Attributes:
        stored: pattern of the stored names, with `{layers}` of the target; group 1 is the name in the head.
        others: beginnings of names that `_NAMES` does not have.
        layer_types: kinds of the head's layers, or the name of the config field that says so: without that field, the
            kind of the target's first layer.
        fields: what else the head's text configuration says differently from the target's.
        count: config field that says how many modules there are.
    """

    stored: str = _OWN
    others: Mapping[str, str | None] = field(default_factory=dict)
    layer_types: tuple[str, ...] | str = ("full_attention",)
    fields: Mapping[str, Any] = field(default_factory=dict)
    count: str = "num_nextn_predict_layers"

    def pattern(self, raw_config: Mapping[str, Any]) -> re.Pattern[str]:
        """What the stored names of a head's tensors look like in a target with this config.json."""
        layers = text_fields(raw_config).get("num_hidden_layers")
        return re.compile(self.stored.replace("{layers}", str(layers) if isinstance(layers, int) else "(?!)"))


_QWEN_MOE_FIELDS = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_QWEN = MtpFamily(count="mtp_num_hidden_layers")
_QWEN_MOE = replace(_QWEN, fields=_QWEN_MOE_FIELDS)
_COPIES = {"shared_head.head.": None, "embed_tokens.": None}  # of the target's
_DEEPSEEK = MtpFamily(_LAST_LAYER, {**_COPIES, "": "layers.0."}, fields={"first_k_dense_replace": 0})
_EXAONE = MtpFamily(layer_types="mtp_layer_types")
_ONE_MODULE = {"layers.0.": "layers.0.", "layers.": None}  # further ones are for drafts that the first makes here

FAMILIES: dict[str, MtpFamily] = {
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe": _QWEN_MOE,
    "qwen3_5_moe_text": _QWEN_MOE,
    "qwen3_next": _QWEN_MOE,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": replace(_DEEPSEEK, fields={"mlp_layer_types": ["sparse"]}),
    "deepseek_v3": _DEEPSEEK,
    "mellum": replace(_EXAONE, fields={"mlp_layer_types": ["sparse"]}),
    "nemotron_h": MtpFamily(others={"layers.1.final_layernorm.": "norm."}, layer_types="mtp_layers_block_type"),
    "exaone_moe": replace(_EXAONE, fields={"mlp_layer_types": ["dense"]}),
    "exaone4": _EXAONE,
    "exaone4_5_text": _EXAONE,
    "ernie4_5_moe": MtpFamily(_ERNIE, fields={"moe_layer_start_index": 1}),
    "mimo_v2_flash": MtpFamily(
        others=_ONE_MODULE, layer_types=("sliding_attention",), fields={"mlp_layer_types": ["dense"]}
    ),
}
"""By `model_type` of the target's text configuration. All read the state behind the target's final norm and feed back
their own normed output. Engines differ over Ernie and MiMo: an ablation of Ernie's head and acceptance measured with
MiMo's speak for these states; `doctor` compares all four ways on one's own texts."""

UNREADABLE = {
    "mimo": "transformers has no class for MiMo-7B's layers",
    "step3p5": "transformers makes Step's text decoder inside its picture model only",
    "deepseek_v4": "DeepSeek V4's head reads several streams",
    "qwen4_exp": "Qwen4-Exp's head reads several streams",
    "qwen4_exp_text": "Qwen4-Exp's head reads several streams",
}
"""Of families whose heads are known and cannot be run right: why."""


@dataclass(frozen=True)
class StoredHead:
    """A head that lies in a folder, inside a target or by itself, as far as headers show it.

    Attributes:
        family: `None`: it lies there by itself.
        stored: its tensors. names: our names of them, and the stored ones.
    """

    folder: Path
    raw_config: dict[str, Any]
    family: MtpFamily | None
    stored: StoredTensors
    names: dict[str, str]

    def config(self) -> MtpConfig:
        """What it is.

        Raises:
            CheckpointFormatError: parts are missing, or the configuration is of no head that can be built.
        """
        if missing := [name for name in _PARTS if name not in self.names]:
            raise CheckpointFormatError(
                f"the MTP head in {self.folder} lacks {', '.join(missing)}; a head is read whole or not at all: fetch "
                "it again"
            )
        if self.family is None:
            return _saved_config(self.folder, self.raw_config)
        try:
            target = AutoConfig.from_pretrained(self.folder)
        except (StrictDataclassError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointFormatError(
                f"{self.folder / CONFIG_FILE} cannot be read by transformers: {config_problem(error)}"
            ) from error
        return _head_config(self.family, target, dtype_name(self.stored.headers[self.names["fc.weight"]]))

    def unpack(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by our names, as they are stored, to the head's: FP8 blocks with scales become bfloat16.

        Raises:
            CheckpointFormatError: they are packed in integers, or some experts are missing.
        """
        return stored if self.family is None else _join_experts(_unpack_blocks(stored))


def text_fields(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a target's config.json that describes the decoder that reads text."""
    inner = raw_config.get("text_config")
    return dict(inner) if isinstance(inner, dict) and inner.get("model_type") else dict(raw_config)


def family_of(raw_config: Mapping[str, Any]) -> MtpFamily | None:
    """The family of a target whose config.json has these fields; `None` where heads of its kind cannot be read."""
    kind = text_fields(raw_config).get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def promises_head(raw_config: Mapping[str, Any]) -> bool:
    """Whether config.json says that there is a head. What transformers saves says so, too, and holds none."""
    family, text = family_of(raw_config), text_fields(raw_config)
    if family is None:
        return False
    return any(fields.get(name) for fields in (text, raw_config) for name in (family.count, "num_mtp_layers"))


def find_head(folder: Path) -> StoredHead | None:
    """The head in `folder`; `None`: there is none of a family that can be read. Reads headers only."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    raw_config = read_json(path)
    if raw_config.get("model_type") == MtpConfig.model_type:
        stored = open_shards([folder / WEIGHTS_FILE])
        return StoredHead(folder, raw_config, None, stored, {name: name for name in stored.headers})
    family = family_of(raw_config)
    if family is None:
        return None
    pattern, beginnings = family.pattern(raw_config), {**_NAMES, **family.others}
    stored = open_shards(_files_with(folder, pattern))
    inner_names = {name: match[1] for name in stored.headers if (match := pattern.fullmatch(name))}
    names = {ours: name for name, inner in inner_names.items() if (ours := renamed(inner, beginnings)) is not None}
    stored = replace(stored, headers={name: stored.headers[name] for name in names.values()})
    return StoredHead(folder, raw_config, family, stored, names) if names.keys() - {"norm.weight"} else None


def refuse_lost_head(folder: Path) -> None:
    """Raise a `CheckpointFormatError` if the target in `folder`, whose files hold no head, is said to have one."""
    path = folder / CONFIG_FILE
    if path.is_file() and promises_head(read_json(path)):
        raise CheckpointFormatError(
            f"{folder}: config.json says that there is an MTP head, but the files hold none of its tensors; "
            "transformers drops them when it saves a model. Pass the folder or Hub id of the model this one was made "
            "from as the drafter, or put its head back: eagle31 mtp BASE --into FOLDER"
        )


def head_files(folder: Path) -> list[str]:
    """Patterns of the files to fetch beside the config.json and the index in `folder`: all weights, or of a target the
    ones that hold its head."""
    weights, path = ["*.safetensors"], folder / CONFIG_FILE
    if not path.is_file() or not (folder / INDEX_FILE).is_file():
        return weights
    raw_config = read_json(path)
    family = family_of(raw_config)
    if family is None:
        return weights
    return [*sorted(_named_files(folder, family.pattern(raw_config))), HEAD_FILE, TOKENIZER_FILE]


def _files_with(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files that may hold tensors of such names: those that an index names, or else the only one, and
    `mtp.safetensors`."""
    named = shard_paths(folder, _named_files(folder, pattern)) if (folder / INDEX_FILE).is_file() else []
    beside = [folder / HEAD_FILE] if named else [folder / WEIGHTS_FILE, folder / HEAD_FILE]
    return sorted({*named, *(path for path in beside if path.is_file())})


def _named_files(folder: Path, pattern: re.Pattern[str]) -> set[str]:
    """The files in which the index puts tensors of such names."""
    return {file for name, file in read_index(folder).items() if pattern.fullmatch(name)}


# --- tensors ----------------------------------------------------------------------------------------------------------

_SCALE = "_scale_inv"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def _unpack_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of FP8 blocks with a scale each, as bfloat16; other packed forms are refused by name."""
    scales = {name.removesuffix(_SCALE): tensors[name] for name in tensors if name.endswith(_SCALE)}
    unpacked = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE):
            continue
        if name in scales:
            unpacked[name] = _scaled(tensor, scales[name])
        elif tensor.dtype in FLOATS:
            unpacked[name] = tensor
        else:
            raise CheckpointFormatError(
                f"the MTP head's {name} is stored as {dtype_name(tensor)}, packed in a way that is not read here; "
                "take the head from the unpacked model: pass that folder or Hub id as the drafter"
            )
    return unpacked


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 weight `(N, K)` times the scale of each block, `(ceil(N / b), ceil(K / b))`."""
    rows, columns = (-(-size // count) for size, count in zip(weight.shape, scale.shape, strict=True))
    factors = scale.float().repeat_interleave(rows, 0)[: weight.shape[0]]
    factors = factors.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return (weight.float() * factors).to(torch.bfloat16)


def _join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one, joined as transformers keeps them: `gate_up_proj` `(E, 2I, H)`, `down_proj`."""
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts[match[1]][match[3]][int(match[2])] = tensor
        else:
            joined[name] = tensor
    for place, parts in experts.items():
        numbers = {frozenset(part) for part in parts.values()}
        if len(numbers) > 1 or numbers != {frozenset(range(max(max(numbers)) + 1))}:
            raise CheckpointFormatError(f"the MTP head's {place} lacks matrices of some experts; fetch it again")
        stacked = {kind: torch.stack([part[i] for i in sorted(part)]) for kind, part in parts.items()}
        if "gate_proj" in stacked:
            stacked["gate_up_proj"] = torch.cat((stacked.pop("gate_proj"), stacked.pop("up_proj")), dim=1)
        joined |= {f"{place}.{kind}": tensor for kind, tensor in stacked.items()}
    return joined


# --- configuration ----------------------------------------------------------------------------------------------------

_NOT_OF_LAYERS = ("id2label", "label2id", "architectures", "dtype", "quantization_config", "transformers_version")
_OF_FILES = ("model_type", "architectures", "transformers_version")


def _saved_config(folder: Path, raw_config: Mapping[str, Any]) -> MtpConfig:
    try:
        config = MtpConfig(**{name: value for name, value in raw_config.items() if name not in _OF_FILES})
        kind = (config.block or {}).get("model_type")
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise CheckpointFormatError(
            f"{folder / CONFIG_FILE} describes no possible MTP head: {config_problem(error)}"
        ) from error
    if kind not in FAMILIES:
        raise CheckpointFormatError(
            f"{folder / CONFIG_FILE}: block, the text configuration of the head's layers, is of model_type "
            f"{shown(kind)}; wanted one of {', '.join(FAMILIES)}"
        )
    return config


def promised_head(config: PreTrainedConfig) -> MtpConfig | None:
    """The head that targets of this configuration are published with; `None`: none that can be read."""
    fields = config.to_dict()
    family = family_of(fields)
    return _head_config(family, config, None) if family is not None and promises_head(fields) else None


def _head_config(family: MtpFamily, target: PreTrainedConfig, dtype: Any) -> MtpConfig:
    text = target.get_text_config(decoder=True)
    layer_types = family.layer_types
    if isinstance(layer_types, str):
        layer_types = getattr(text, layer_types, None) or text.layer_types[:1]
    of_layers = {name: value for name, value in text.to_dict().items() if name not in _NOT_OF_LAYERS}
    block = of_layers | dict(family.fields) | {"num_hidden_layers": len(layer_types)}
    if getattr(text, "layer_types", None) is not None:
        block["layers_block_type" if "layers_block_type" in block else "layer_types"] = list(layer_types)
    slides = "sliding_attention" in layer_types
    return MtpConfig(
        family=text.model_type,
        block=block,
        norm_output=True,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=len(layer_types),
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or text.layer_norm_epsilon,
        sliding_window=text.sliding_window if slides else None,  # type: ignore[arg-type]
        own_lm_head=False,
        dtype=dtype,
    )
