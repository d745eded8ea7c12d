"""What each published drafter layout calls its tensors and config fields: one table per format, used both ways.

Canonical names are the parameter names of our drafter (`layers.0.…` also for the first layer) and the fields of
`Eagle31Config`. Layer ids become `hs` indices here (`hs[k]` = residual stream entering target layer `k`).
Sources: the writers and loaders of SafeAILab/EAGLE, SpecForge, speculators, ModelOpt, TorchSpec, NeMo Automodel,
vLLM and SGLang; `docs/formats.md` holds the same tables in prose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

REQUIRED: Any = object()
"""Default of a field that a config must state."""

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_LAYER_IDS = f"eagle_config.{LAYER_IDS}"
# How a stored list of layer ids is to be understood.
HS_INDEX = "hs index"  # residual stream entering layer i
COMPLETED_LAYER = "completed layer"  # output of 0-based layer i, which is hs[i + 1]
SGLANG_RULE = "completed layer if the first id is 1, else hs index"  # SGLang since 2026-05

OTHER_LAYER_IDS = tuple(
    (path, COMPLETED_LAYER)
    for path in ("target_layer_ids", "target_hidden_layer_ids", "eagle_config.target_hidden_layer_ids")
)
"""Where DeepSpec and verl-SpeCo name the target's layers, whatever else a file is like. Read, never written."""
LAYER_ID_PLACES = (LAYER_IDS, NESTED_LAYER_IDS, *(path for path, _ in OTHER_LAYER_IDS))
"""Dotted paths of `config.json` that any format or engine reads layer ids from."""


@dataclass(frozen=True)
class Field:
    """One config fact: its name here, its dotted path in `config.json`, and what a missing or null entry means."""

    name: str
    stored: str
    default: Any = None
    also: tuple[str, ...] = ()  # other spellings, read but never written
    written: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.stored, *self.also)


@dataclass(frozen=True)
class Format:
    """One published layout. `prefixes` pairs canonical with stored name prefixes; everything else keeps its name."""

    name: str
    title: str
    architectures: tuple[str, ...]  # the first is written
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]
    fields: tuple[Field, ...]
    layer_ids: tuple[tuple[str, str], ...]  # (dotted path, convention) in the order engines look
    prefixes: tuple[tuple[str, str], ...] = (("layers.0.", "midlayer."),)
    also_prefixes: tuple[tuple[str, str], ...] = (("layers.0.", "layers.0."),)
    expresses: frozenset[str] = frozenset()  # facts of a drafter, named in `losses`
    constants: Mapping[str, Any] = field(default_factory=dict)  # written unless the metadata says otherwise
    demands: Mapping[str, Any] = field(default_factory=dict)  # a file stating another value is another network
    layer_config: str = ""  # dotted prefix of the Llama fields
    target_model: str = "target_model"  # dotted path of the target's name and architectures
    needs_target: bool = False  # whether its loaders ask for them, and read the embedding from the file alone
    ignores_the_rest: bool = False  # its classes read these fields and no others: the rest of a config is the target's


def filled(value: int | None) -> int:
    """A size that may be left out when `Eagle31Config` is made and is always filled in by it."""
    assert value is not None
    return value


def has_reduced_vocabulary(config: Eagle31Config) -> bool:
    """`Vd < V`: the draft head has rows for some target ids only, and a `d2t` map says which."""
    return filled(config.draft_vocab_size) < config.vocab_size


def _layer_fields(prefix: str = "") -> tuple[Field, ...]:
    rows: tuple[tuple[str, Any], ...] = (
        ("vocab_size", REQUIRED),
        ("hidden_size", REQUIRED),
        ("intermediate_size", REQUIRED),
        ("num_hidden_layers", None),  # written exactly, never believed: published files say 36 and 40 for one layer
        ("num_attention_heads", REQUIRED),
        ("num_key_value_heads", None),
        ("head_dim", None),
        ("hidden_act", "silu"),
        ("rms_norm_eps", 1e-6),
        ("max_position_embeddings", 2048),
        ("initializer_range", 0.02),
        ("attention_bias", False),
        ("attention_dropout", 0.0),
        ("mlp_bias", False),
        ("bos_token_id", None),
        ("eos_token_id", None),
        ("pad_token_id", None),
    )
    spellings = {
        "hidden_act": ("hidden_activation", "activation_function", "mlp_hidden_act"),  # Gemma, GPT-2, Nemotron
        "rms_norm_eps": ("norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps"),
        "num_key_value_heads": ("num_kv_heads",),
    }
    return tuple(
        Field(name, prefix + name, default, also=tuple(prefix + other for other in spellings.get(name, ())))
        for name, default in rows
    )


def _drafter_fields(norm_before_residual: bool = False, num_aux: bool = True) -> tuple[Field, ...]:
    rows = (
        Field("draft_vocab_size", "draft_vocab_size", None, also=("truncated_vocab_size",)),  # nebius
        Field("target_hidden_size", "target_hidden_size"),
        Field("fc_norm", "fc_norm", False, also=("use_aux_norm",)),
        Field("norm_before_fc", "norm_before_fc", False, also=("eagle_config.norm_before_fc",)),
        Field("norm_output", "norm_output", False, also=("eagle_config.return_hidden_post_norm",)),
        Field("norm_before_residual", "norm_before_residual", norm_before_residual),
    )
    return (*rows, Field("num_aux_hidden_states", "num_aux_hidden_states")) if num_aux else rows


_SGLANG_NAMES = (
    ("layers.0.", "layers.0."),
    ("fc_norm.0.", "aux_norm_low."),
    ("fc_norm.1.", "aux_norm_mid."),
    ("fc_norm.2.", "aux_norm_high."),
)
_MODELOPT_MARKS = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
)
_UNTIED = {"model_type": "llama", "tie_word_embeddings": False}
# No query/key norms: the class both engines load the plain layout with has none.
_SAID_PLAINLY = frozenset({
    "grouped", "per_slot", "concatenated", "norm_output", "norm_before_residual", "fc_bias", "biases", "layers",
    "widths", "shared_embedding", "shared_head", "shared_head_rows", "aux_count",
})  # fmt: skip


LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_LATENT_FIELDS = (
    *(row for row in _layer_fields() if row.name != "head_dim"),  # there it is the rotated width
    *(Field(name, name, None if name == "q_lora_rank" else REQUIRED) for name in LATENT_SIZES),
)


def _has_architecture(config: Mapping[str, Any], prefix: str) -> bool:
    return any(str(name).startswith(prefix) for name in config.get("architectures") or ())


_TABLE = (
    Format(
        name="nemo",
        title="NVIDIA NeMo Automodel",
        architectures=("LlamaEagle3DraftModel",),
        recognises=lambda config, names: _has_architecture(config, "LlamaEagle3") or "model.fc.weight" in names,
        fields=(*_layer_fields(), *_drafter_fields(), *(Field(n, n, written=False) for n in LATENT_SIZES)),
        ignores_the_rest=True,
        layer_ids=((LAYER_IDS, COMPLETED_LAYER),),
        prefixes=tuple((part, f"model.{part}") for part in ("layers.", "fc.", "fc_norm.", "norm.", "embed_tokens.")),
        also_prefixes=(),
        # Its class always holds an embedding; a file without one would be filled with random rows.
        expresses=frozenset({"grouped", "per_slot", "norm_output", "biases", "widths", "aux_count"}),
        constants=_UNTIED,
    ),
    Format(
        name="mla",
        title="MLA (lightseek, TorchSpec; vLLM's and SGLang's Eagle3DeepseekV2ForCausalLM)",
        architectures=LATENT_ARCHITECTURES,
        recognises=lambda config, names: (
            _has_architecture(config, "Eagle3Deepseek") or any("kv_a_proj_with_mqa" in name for name in names)
        ),
        fields=(*_LATENT_FIELDS, *_drafter_fields()),
        layer_ids=((LAYER_IDS, HS_INDEX), (NESTED_LAYER_IDS, SGLANG_RULE)),
        also_prefixes=_SGLANG_NAMES,
        expresses=frozenset(
            {
                "latent",
                "per_slot",
                "norm_output",
                "norm_before_residual",
                "widths",
                "layers",
                "shared_embedding",
                "shared_head",
                "aux_count",
            }
        ),
        constants={"model_type": "deepseek_v3", "tie_word_embeddings": False},
    ),
    Format(
        name="speculators",
        title="Red Hat / speculators",
        architectures=("Eagle3DraftModel", "Eagle3Speculator"),
        recognises=lambda config, names: "speculators_model_type" in config or "speculators_config" in config,
        fields=(*_layer_fields("transformer_layer_config."), *_drafter_fields(norm_before_residual=True)),
        layer_ids=((LAYER_IDS, HS_INDEX),),
        prefixes=(),
        expresses=frozenset(
            {
                "grouped",
                "per_slot",
                "concatenated",
                "norm_output",
                "norm_before_residual",
                "qk_norm",
                "biases",
                "layers",
                "shared_embedding",
                "aux_count",
            }
        ),
        constants={
            "speculators_model_type": "eagle3",
            "speculators_config.algorithm": "eagle3",
            "speculators_config.default_proposal_method": "greedy",
            "speculators_config.proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "speculators_config.verifier": {"name_or_path": None, "architectures": []},
        },
        layer_config="transformer_layer_config.",
        target_model="speculators_config.verifier",
        # Of the embedding: speculators 0.9.0 with transformers 5.19 leaves a missing one at zeros, unsaid.
        needs_target=True,
    ),
    Format(
        name="torchspec",
        title="TorchSpec / lightseek",
        architectures=("LlamaForCausalLMEagle3",),
        recognises=lambda config, names: "_torchspec_version" in config,
        fields=(*_layer_fields(), *_drafter_fields()),
        layer_ids=((LAYER_IDS, COMPLETED_LAYER), (NESTED_LAYER_IDS, COMPLETED_LAYER)),
        expresses=frozenset({"grouped", "per_slot", "norm_output", "widths", "shared_embedding", "aux_count"}),
        constants={**_UNTIED, "_torchspec_version": "unknown"},
    ),
    Format(
        name="modelopt",
        title="NVIDIA ModelOpt",
        architectures=("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
        recognises=lambda config, names: any(mark in (config.get("eagle_config") or {}) for mark in _MODELOPT_MARKS),
        fields=(*_layer_fields(), *_drafter_fields(num_aux=False)),
        layer_ids=((NESTED_LAYER_IDS, SGLANG_RULE), (LAYER_IDS, HS_INDEX)),
        also_prefixes=(
            ("layers.0.", "layers.0."),
            ("layers.0.hidden_norm.", "hidden_norm."),
            ("layers.0.input_layernorm.", "input_embeds_norm."),
            ("lm_head.", "eagle_lm_head."),
        ),
        expresses=frozenset({"grouped", "biases", "layers", "shared_embedding", "shared_head"}),
        constants={**_UNTIED, "eagle_config.use_aux_hidden_state": True},
        demands={
            "eagle_config.use_input_layernorm_in_first_layer": True,
            "eagle_config.use_last_layernorm": True,
            "eagle_config.use_mtp_layernorm": False,
        },
    ),
    Format(
        name="specforge",
        title="SpecForge / SGLang (also AQ-MedAI, AngelSlim, SpecDrift)",
        architectures=("LlamaForCausalLMEagle3",),
        recognises=lambda config, names: (
            _has_architecture(config, "LlamaForCausalLMEagle3") and "num_aux_hidden_states" not in config
        ),
        fields=(*_layer_fields(), *_drafter_fields(num_aux=False)),
        layer_ids=((NESTED_LAYER_IDS, SGLANG_RULE), (LAYER_IDS, HS_INDEX)),
        also_prefixes=_SGLANG_NAMES,
        expresses=frozenset({"grouped", "per_slot", "norm_output", "widths", "shared_embedding"}),
        constants=_UNTIED,
    ),
    Format(
        name="plain",
        title="plain (SafeAILab, nebius, and what this package writes)",
        architectures=("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
        recognises=lambda config, names: True,
        fields=(*_layer_fields(), *_drafter_fields(), Field("fc_bias", "bias", False)),
        layer_ids=((LAYER_IDS, HS_INDEX), (NESTED_LAYER_IDS, SGLANG_RULE)),
        also_prefixes=_SGLANG_NAMES,
        expresses=_SAID_PLAINLY,
        constants=_UNTIED,
    ),
)
_BY_NAME = {table.name: table for table in _TABLE}

FORMATS: tuple[str, ...] = tuple(sorted(_BY_NAME))
"""Names accepted by `write_checkpoint(format=…)` and reported by `read_checkpoint`."""


def default_format(config: Eagle31Config) -> str:
    """The layout for a drafter that nobody has asked for another one of: what vLLM and SGLang both read."""
    return "mla" if config.is_latent else "plain"


def find_format(name: str) -> Format:
    """The table called `name`.

    Raises:
        ConfigurationError: there is no such format.
    """
    if name not in _BY_NAME:
        raise ConfigurationError(f"unknown checkpoint format {name!r}; wanted one of {', '.join(FORMATS)}")
    return _BY_NAME[name]


def detect_format(config: Mapping[str, Any], names: Collection[str]) -> Format:
    """The layout of a checkpoint, from its `config.json` and stored tensor names."""
    return next(table for table in _TABLE if table.recognises(config, names))


# ---------------------------------------------------------------- tensor names

_UNUSED = re.compile(r"^verifier_(norm|lm_head)\.|\.rotary_emb\.inv_freq$")
_RENAMED = {"draft_id_to_target_id": "d2t"}  # as vLLM calls it in memory, and whoever saves from there
_SGLANG_EXTRA_LAYER = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")


def canonical_name(table: Format, stored: str) -> str | None:
    """Our name for a stored tensor; `None` for one that takes no part in drafting (teacher copies, rope buffers)."""
    if _UNUSED.search(stored):
        return None
    by_length = sorted((*table.prefixes, *table.also_prefixes), key=lambda pair: -len(pair[1]))
    for ours, theirs in by_length:
        if stored.startswith(theirs):
            stored = ours + stored.removeprefix(theirs)
            break
    stored = _RENAMED.get(stored, stored)
    # SGLang calls the norm before attention `hidden_norm` in every layer; elsewhere only the first layer has one.
    return _SGLANG_EXTRA_LAYER.sub(r"layers.\1.input_layernorm.", stored)


def stored_name(table: Format, canonical: str) -> str:
    """The name under which `table`'s format stores one of our tensors."""
    for ours, theirs in table.prefixes:
        if canonical.startswith(ours):
            return theirs + canonical.removeprefix(ours)
    return canonical


# ---------------------------------------------------------------- layer ids


def to_hs_indices(ids: Sequence[int], convention: str) -> list[int]:
    """Stored layer ids as `hs` indices."""
    shift = convention == COMPLETED_LAYER or (convention == SGLANG_RULE and ids[0] == 1)
    return [i + 1 for i in ids] if shift else list(ids)


def from_hs_indices(hs: Sequence[int], convention: str) -> list[int] | None:
    """`hs` indices as stored layer ids; `None` where the convention has no words for them."""
    lowered = [k - 1 for k in hs]
    candidates = [lowered, list(hs)]  # the lowered list first: both SGLang generations agree on a first id of 1
    return next((ids for ids in candidates if min(ids) >= 0 and to_hs_indices(ids, convention) == list(hs)), None)
