"""What each published drafter layout calls its tensors and config fields: one table per layout.

All seven are read; `plain`, `mla` and `speculators` are written, too, by the same tables. Canonical names are the
parameter names of our drafter (`layers.0.…` also for the first layer) and the fields of `Eagle31Config`. Layer ids
become `hs` indices here (`hs[k]` = residual stream entering target layer `k`).
Sources: the writers and loaders of SafeAILab/EAGLE, SpecForge, speculators, ModelOpt, TorchSpec, NeMo Automodel,
vLLM and SGLang; `docs/formats.md` holds the same tables in prose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Eagle31Config
from ..errors import ConfigurationError, removal

REQUIRED: Any = object()
"""Default of a field that a config must state."""

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_LAYER_IDS = f"eagle_config.{LAYER_IDS}"
# How a stored list of layer ids is to be understood.
HS_INDEX = "hs index"  # residual stream entering layer i
COMPLETED_LAYER = "completed layer"  # output of 0-based layer i, which is hs[i + 1]
SGLANG_RULE = "completed layer if the first id is 1, else hs index"  # SGLang since 2026-05

_OTHER_PLACES = ("target_layer_ids", "target_hidden_layer_ids", "eagle_config.target_hidden_layer_ids")
OTHER_LAYER_IDS = tuple((path, COMPLETED_LAYER) for path in _OTHER_PLACES)
"""Where DeepSpec and verl-SpeCo name the target's layers, whatever else a file is like. Read, never written."""
LAYER_ID_PLACES = (LAYER_IDS, NESTED_LAYER_IDS, *_OTHER_PLACES)
"""Dotted paths of `config.json` that any format or engine reads layer ids from."""


_MIDLAYER = (("layers.0.", "midlayer."),)  # a first layer that is called `layers.0` already keeps its name


@dataclass(frozen=True)
class Field:
    """One config fact: its name here, its dotted path in `config.json`, and what a missing or null entry means."""

    name: str
    stored: str
    default: Any = None
    also: tuple[str, ...] = ()  # other spellings, read but never written

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.stored, *self.also)


@dataclass(frozen=True)
class Layout:
    """One published layout.

    Attributes:
        recognises: whether a `config.json` and stored tensor names are of this layout.
        layer_ids: `(dotted path, convention)` of the places where it names target layers.
        prefixes: pairs of canonical and stored name prefixes; everything else keeps its name.
        lacks: names of the facts (`_FACTS`) that it cannot express; `None`: it is read and not written.
        architecture, constants: what is written of every drafter: its class, and entries that are always the same.
        layer_config: dotted prefix of the Llama fields. target_model: dotted path of the target's name.
        needs_target: whether its loaders ask for the target's name, and read the embedding from the file alone.
        ignores_the_rest: its classes read these fields and no others: the rest of a config is the target's.
    """

    name: str
    title: str
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]
    fields: tuple[Field, ...]
    layer_ids: tuple[tuple[str, str], ...]
    prefixes: tuple[tuple[str, str], ...] = _MIDLAYER
    lacks: frozenset[str] | None = None
    architecture: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    layer_config: str = ""
    target_model: str = "target_model"
    needs_target: bool = False
    ignores_the_rest: bool = False


def _layer_fields(prefix: str = "") -> tuple[Field, ...]:
    # num_hidden_layers is written and never believed: published files say 36 and 40 for one layer.
    rows: dict[str, Any] = {
        "vocab_size": REQUIRED, "hidden_size": REQUIRED, "intermediate_size": REQUIRED, "num_hidden_layers": None,
        "num_attention_heads": REQUIRED, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "initializer_range": 0.02, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    spellings = {
        "hidden_act": ("hidden_activation", "activation_function", "mlp_hidden_act"),  # Gemma, GPT-2, Nemotron
        "rms_norm_eps": ("norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps"),
        "num_key_value_heads": ("num_kv_heads",),
    }
    return tuple(
        Field(name, prefix + name, default, also=tuple(prefix + other for other in spellings.get(name, ())))
        for name, default in rows.items()
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
    *_MIDLAYER,
    *((f"fc_norm.{slot}.", f"aux_norm_{name}.") for slot, name in enumerate(("low", "mid", "high"))),
)
_MODELOPT_MARKS = {"use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
                   "next_layer_regular"}  # fmt: skip

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_LATENT_FIELDS = (
    *(row for row in _layer_fields() if row.name != "head_dim"),  # there it is the rotated width
    *(Field(name, name, None if name == "q_lora_rank" else REQUIRED) for name in LATENT_SIZES),
)


def _has_architecture(config: Mapping[str, Any], prefix: str) -> bool:
    return any(str(name).startswith(prefix) for name in config.get("architectures") or ())


_TABLE = (
    Layout(
        name="nemo",
        title="NVIDIA NeMo Automodel",
        recognises=lambda config, names: _has_architecture(config, "LlamaEagle3") or "model.fc.weight" in names,
        fields=(*_layer_fields(), *_drafter_fields(), *(Field(name, name) for name in LATENT_SIZES)),
        ignores_the_rest=True,
        layer_ids=((LAYER_IDS, COMPLETED_LAYER),),
        prefixes=tuple((part, f"model.{part}") for part in ("layers.", "fc.", "fc_norm.", "norm.", "embed_tokens.")),
    ),
    Layout(
        name="mla",
        title="MLA (lightseek, TorchSpec; vLLM's and SGLang's Eagle3DeepseekV2ForCausalLM)",
        recognises=lambda config, names: (
            _has_architecture(config, "Eagle3Deepseek") or any("kv_a_proj_with_mqa" in name for name in names)
        ),
        fields=(*_LATENT_FIELDS, *_drafter_fields()),
        layer_ids=((LAYER_IDS, HS_INDEX), (NESTED_LAYER_IDS, SGLANG_RULE)),
        prefixes=_SGLANG_NAMES,
        lacks=frozenset({"grouped", "concatenated", "fc_bias", "biases", "shared_head_rows"}),
        architecture="Eagle3DeepseekV2ForCausalLM",
        constants={"model_type": "deepseek_v3", "tie_word_embeddings": False},
    ),
    Layout(
        name="speculators",
        title="Red Hat / speculators",
        recognises=lambda config, names: "speculators_model_type" in config or "speculators_config" in config,
        fields=(*_layer_fields("transformer_layer_config."), *_drafter_fields(norm_before_residual=True)),
        layer_ids=((LAYER_IDS, HS_INDEX),),
        prefixes=(),
        lacks=frozenset({"latent", "fc_bias", "widths", "shared_head", "shared_head_rows"}),
        architecture="Eagle3DraftModel",
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
    Layout(
        name="torchspec",
        title="TorchSpec / lightseek",
        recognises=lambda config, names: "_torchspec_version" in config,
        fields=(*_layer_fields(), *_drafter_fields()),
        layer_ids=((LAYER_IDS, COMPLETED_LAYER), (NESTED_LAYER_IDS, COMPLETED_LAYER)),
    ),
    Layout(
        name="modelopt",
        title="NVIDIA ModelOpt",
        recognises=lambda config, names: not _MODELOPT_MARKS.isdisjoint(config.get("eagle_config") or ()),
        fields=(*_layer_fields(), *_drafter_fields(num_aux=False)),
        layer_ids=((NESTED_LAYER_IDS, SGLANG_RULE), (LAYER_IDS, HS_INDEX)),
        prefixes=(
            *_MIDLAYER,
            ("layers.0.hidden_norm.", "hidden_norm."),
            ("layers.0.input_layernorm.", "input_embeds_norm."),
            ("lm_head.", "eagle_lm_head."),
        ),
    ),
    Layout(
        name="specforge",
        title="SpecForge / SGLang (also AQ-MedAI, AngelSlim, SpecDrift)",
        recognises=lambda config, names: (
            _has_architecture(config, "LlamaForCausalLMEagle3") and "num_aux_hidden_states" not in config
        ),
        fields=(*_layer_fields(), *_drafter_fields(num_aux=False)),
        layer_ids=((NESTED_LAYER_IDS, SGLANG_RULE), (LAYER_IDS, HS_INDEX)),
        prefixes=_SGLANG_NAMES,
    ),
    Layout(
        name="plain",
        title="plain (SafeAILab, nebius, and what this package writes)",
        recognises=lambda config, names: True,
        fields=(*_layer_fields(), *_drafter_fields(), Field("fc_bias", "bias", False)),
        layer_ids=((LAYER_IDS, HS_INDEX), (NESTED_LAYER_IDS, SGLANG_RULE)),
        prefixes=_SGLANG_NAMES,
        lacks=frozenset({"latent", "qk_norm"}),  # the class both engines load it with has no query/key norms
        architecture="LlamaForCausalLMEagle3",
        constants={"model_type": "llama", "tie_word_embeddings": False},
    ),
)

FORMATS: tuple[str, ...] = tuple(sorted(layout.name for layout in _TABLE))
"""Names of the layouts that `read_checkpoint` reads and reports."""
_WRITTEN = {layout.name: layout for layout in _TABLE if layout.lacks is not None}
WRITTEN_FORMATS: tuple[str, ...] = tuple(sorted(_WRITTEN))
"""Those of them that `write_checkpoint(format=…)` writes."""


def default_format(config: Eagle31Config) -> str:
    """The layout that is written where none is named: the one that vLLM and SGLang both read."""
    if config.model_type == "eagle31_mtp":
        return "mtp"
    return "mla" if config.is_latent else "plain"


def detect_layout(config: Mapping[str, Any], names: Collection[str]) -> Layout:
    """The layout of a checkpoint, from its `config.json` and stored tensor names."""
    return next(layout for layout in _TABLE if layout.recognises(config, names))


def written_layout(name: str) -> Layout:
    """The layout called `name`, to be written.

    Raises:
        ConfigurationError: there is none, or it is only read.
    """
    if name not in _WRITTEN:
        raise ConfigurationError(
            removal(f"--format {name}")
            or f"unknown checkpoint format {name!r}; wanted one of {', '.join(WRITTEN_FORMATS)}"
        )
    return _WRITTEN[name]


# ---------------------------------------------------------------- what a layout cannot express

_FACTS: dict[str, tuple[str, Callable[[Eagle31Config], bool]]] = {
    "latent": ("latent attention (kv_lora_rank)", lambda c: c.is_latent),
    "grouped": ("attention with keys and values of its own (kv_lora_rank=None)", lambda c: not c.is_latent),
    "concatenated": ("one norm over all aux states (aux_norm='concatenated')", lambda c: c.aux_norm == "concatenated"),
    "qk_norm": ("query and key norms (qk_norm)", lambda c: c.qk_norm),
    "fc_bias": ("a bias on fc (fc_bias)", lambda c: c.fc_bias),
    "biases": ("attention or MLP biases", lambda c: c.attention_bias or c.mlp_bias),
    "widths": ("a target of another width (target_hidden_size)", lambda c: c.target_hidden_size != c.hidden_size),
    "shared_head": (
        "the target's whole LM head (own_lm_head=False)",
        lambda c: not c.own_lm_head and not c.has_reduced_vocabulary,
    ),
    "shared_head_rows": (
        "draft rows of the target's LM head (own_lm_head=False with a reduced draft vocabulary)",
        lambda c: not c.own_lm_head and c.has_reduced_vocabulary,
    ),
}
_SHARED_HEADS = {"shared_head", "shared_head_rows"}


def _unsaid(layout: Layout, config: Eagle31Config) -> list[str]:
    """Facts of this drafter that `layout` cannot express."""
    return [name for name, (_, holds) in _FACTS.items() if name in (layout.lacks or ()) and holds(config)]


def parts_to_copy(layout: Layout, config: Eagle31Config) -> set[str]:
    """`"embedding"` and `"head"`: what this drafter shares with its target and `layout` or its loader cannot share."""
    parts = {"head"} if _SHARED_HEADS.intersection(_unsaid(layout, config)) else set()
    return parts | ({"embedding"} if layout.needs_target and not config.own_embedding else set())


def check_expressible(layout: Layout, config: Eagle31Config) -> None:
    """Raise a `ConfigurationError` if `layout` cannot express something of this drafter: what, and what to do."""
    unsaid = _unsaid(layout, config)
    if not unsaid:
        return
    ways = [f"write it as {other.name}" for other in _WRITTEN.values() if not _unsaid(other, config)]
    if _SHARED_HEADS.issuperset(unsaid):
        ways.append("name the target (--target), whose head is then copied into the drafter")
    raise ConfigurationError(
        f"the {layout.name} format cannot express {', '.join(_FACTS[name][0] for name in unsaid)}; "
        + ("; or ".join(ways) or "no format can: change the drafter")
    )


# ---------------------------------------------------------------- tensor names

_UNUSED = re.compile(r"^verifier_(norm|lm_head)\.|\.rotary_emb\.inv_freq$")
_RENAMED = {"draft_id_to_target_id": "d2t"}  # as vLLM calls it in memory
_SGLANG_EXTRA_LAYER = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")


def canonical_name(layout: Layout, stored: str) -> str | None:
    """Our name for a stored tensor; `None` for one that takes no part in drafting (teacher copies, rope buffers)."""
    if _UNUSED.search(stored):
        return None
    for ours, theirs in sorted(layout.prefixes, key=lambda pair: -len(pair[1])):
        if stored.startswith(theirs):
            stored = ours + stored.removeprefix(theirs)
            break
    stored = _RENAMED.get(stored, stored)
    # SGLang calls the norm before attention `hidden_norm` in every layer; elsewhere only the first layer has one.
    return _SGLANG_EXTRA_LAYER.sub(r"layers.\1.input_layernorm.", stored)


def stored_name(layout: Layout, canonical: str) -> str:
    """The name under which `layout` stores one of our tensors."""
    first_layer = dict(layout.prefixes).get("layers.0.", "layers.0.")  # the others are read and not written
    return re.sub(r"^layers\.0\.", first_layer, canonical)


# ---------------------------------------------------------------- layer ids


def to_hs_indices(ids: Sequence[int], convention: str) -> list[int]:
    """Stored layer ids as `hs` indices."""
    shift = convention == COMPLETED_LAYER or (convention == SGLANG_RULE and ids[0] == 1)
    return [i + 1 for i in ids] if shift else list(ids)


def sglang_indices(hs: Sequence[int]) -> list[int] | None:
    """`hs` indices as SGLang's rule reads them; `None` where it has no words for them."""
    lowered = [k - 1 for k in hs]
    if lowered[0] == 1 and min(lowered) >= 0:
        return lowered  # both SGLang generations agree on a first id of 1
    return list(hs) if hs[0] != 1 else None
