"""What published drafter layouts call their tensors and config fields, and in what they differ.

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
from .files import renamed

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


@dataclass(frozen=True)
class Field:
    """One config fact: its name here, its dotted path in `config.json`, and what a missing or null entry means."""

    name: str
    stored: str
    default: Any = None
    also: tuple[str, ...] = ()  # other spellings, read but never written
    fact: str = ""  # of `_FACTS`: written where the layout can express it


@dataclass(frozen=True)
class Layout:
    """One published layout.

    Attributes:
        recognises: whether a `config.json` and stored tensor names are of this layout.
        layer_ids: `(dotted path, convention)` of the places where it names target layers.
        lacks: names of the facts (`_FACTS`) that it cannot express; `None`: it is read and not written.
        architecture, constants: what is written of every drafter: its class, and entries that are always the same.
        first_layer: what the names of its first layer's tensors are written with.
        layer_config: dotted prefix of the Llama fields. target_model: dotted path of the target's name.
        norm_before_residual: of a file that does not say.
        needs_target: whether its loaders ask for the target's name, and read the embedding from the file alone.
        ignores_the_rest: its classes read these fields and no others: the rest of a config is the target's.
    """

    name: str
    title: str
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]
    layer_ids: tuple[tuple[str, str], ...] = ((LAYER_IDS, HS_INDEX), (NESTED_LAYER_IDS, SGLANG_RULE))
    lacks: frozenset[str] | None = None
    architecture: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    first_layer: str = "midlayer."
    layer_config: str = ""
    target_model: str = "target_model"
    norm_before_residual: bool = False
    needs_target: bool = False
    ignores_the_rest: bool = False

    @property
    def fields(self) -> tuple[Field, ...]:
        """What is read of its `config.json`."""
        return (*_layer_fields(self.layer_config), *_DRAFTER_FIELDS)


def _layer_fields(prefix: str) -> tuple[Field, ...]:
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
    facts = {"head_dim": "grouped"}  # of latent attention it is the rotated width
    return tuple(
        Field(
            name, prefix + name, default, tuple(prefix + also for also in spellings.get(name, ())), facts.get(name, "")
        )
        for name, default in rows.items()
    )


LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_DRAFTER_FIELDS = (
    Field("draft_vocab_size", "draft_vocab_size", also=("truncated_vocab_size",)),  # nebius
    Field("target_hidden_size", "target_hidden_size"),
    Field("fc_norm", "fc_norm", False, also=("use_aux_norm",)),
    Field("norm_before_fc", "norm_before_fc", False, also=("eagle_config.norm_before_fc",)),
    Field("norm_output", "norm_output", False, also=("eagle_config.return_hidden_post_norm",)),
    Field("norm_before_residual", "norm_before_residual"),
    Field("num_aux_hidden_states", "num_aux_hidden_states"),
    Field("fc_bias", "bias", False, fact="fc_bias"),
    *(Field(name, name, fact="latent") for name in LATENT_SIZES),
)
_MODELOPT_MARKS = {"use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
                   "next_layer_regular"}  # fmt: skip


def _has_architecture(config: Mapping[str, Any], prefix: str) -> bool:
    return any(str(name).startswith(prefix) for name in config.get("architectures") or ())


_TABLE = (
    Layout(
        name="nemo",
        title="NVIDIA NeMo Automodel",
        recognises=lambda config, names: _has_architecture(config, "LlamaEagle3") or "model.fc.weight" in names,
        ignores_the_rest=True,
        layer_ids=((LAYER_IDS, COMPLETED_LAYER),),
    ),
    Layout(
        name="mla",
        title="MLA (lightseek, TorchSpec; vLLM's and SGLang's Eagle3DeepseekV2ForCausalLM)",
        recognises=lambda config, names: (
            _has_architecture(config, "Eagle3Deepseek") or any("kv_a_proj_with_mqa" in name for name in names)
        ),
        lacks=frozenset({"grouped", "concatenated", "fc_bias", "biases", "shared_head_rows"}),
        architecture="Eagle3DeepseekV2ForCausalLM",
        constants={"model_type": "deepseek_v3", "tie_word_embeddings": False},
    ),
    Layout(
        name="speculators",
        title="Red Hat / speculators",
        recognises=lambda config, names: "speculators_model_type" in config or "speculators_config" in config,
        layer_ids=((LAYER_IDS, HS_INDEX),),
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
        first_layer="layers.0.",
        layer_config="transformer_layer_config.",
        target_model="speculators_config.verifier",
        norm_before_residual=True,
        # Of the embedding: speculators 0.9.0 with transformers 5.19 leaves a missing one at zeros, unsaid.
        needs_target=True,
    ),
    Layout(
        name="torchspec",
        title="TorchSpec / lightseek",
        recognises=lambda config, names: "_torchspec_version" in config,
        layer_ids=((LAYER_IDS, COMPLETED_LAYER), (NESTED_LAYER_IDS, COMPLETED_LAYER)),
    ),
    Layout(
        name="modelopt",
        title="NVIDIA ModelOpt",
        recognises=lambda config, names: not _MODELOPT_MARKS.isdisjoint(config.get("eagle_config") or ()),
    ),
    Layout(
        name="specforge",
        title="SpecForge / SGLang (also AQ-MedAI, AngelSlim, SpecDrift)",
        recognises=lambda config, names: (
            _has_architecture(config, "LlamaForCausalLMEagle3") and "num_aux_hidden_states" not in config
        ),
    ),
    Layout(
        name="plain",
        title="plain (SafeAILab, nebius, and what this package writes)",
        recognises=lambda config, names: True,
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
    "grouped": ("attention that is not latent (kv_lora_rank=None)", lambda c: not c.is_latent),
    "concatenated": ("one norm over all aux states (aux_norm='concatenated')", lambda c: c.aux_norm == "concatenated"),
    "qk_norm": ("query and key norms (qk_norm)", lambda c: c.qk_norm),
    "fc_bias": ("a bias on fc (fc_bias)", lambda c: c.fc_bias),
    "biases": ("biases of MLP or grouped attention", lambda c: c.mlp_bias or (c.attention_bias and not c.is_latent)),
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
    others = sorted(other.name for other in _WRITTEN.values() if not _unsaid(other, config))
    ways = [f"write it as {' or '.join(others)}"] if others else []
    if _SHARED_HEADS.issuperset(unsaid):
        ways.append("name the target (--target), whose head is then copied into the drafter")
    raise ConfigurationError(
        f"the {layout.name} format cannot express {', '.join(_FACTS[name][0] for name in unsaid)}; "
        + ("; or ".join(ways) or "no format can: change the drafter")
    )


# ---------------------------------------------------------------- tensor names

_NAMES: dict[str, str | None] = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",  # SGLang's first names
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "hidden_norm.": "layers.0.hidden_norm.",  # ModelOpt
    "input_embeds_norm.": "layers.0.input_layernorm.",
    "eagle_lm_head.": "lm_head.",
    "draft_id_to_target_id": "d2t",  # as vLLM calls it in memory
    "verifier_norm.": None,  # copies of the target's, to train with
    "verifier_lm_head.": None,
}
_SGLANG_EXTRA_LAYER = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")


def canonical_name(stored: str) -> str | None:
    """Our name for a stored tensor; `None` for one that takes no part in drafting (teacher copies, rope buffers)."""
    name = None if stored.endswith(".rotary_emb.inv_freq") else renamed(stored.removeprefix("model."), _NAMES)
    # SGLang calls the norm before attention `hidden_norm` in every layer; elsewhere only the first layer has one.
    return name and _SGLANG_EXTRA_LAYER.sub(r"layers.\1.input_layernorm.", name)


def stored_name(layout: Layout, canonical: str) -> str:
    """The name under which `layout` stores one of our tensors."""
    return re.sub(r"^layers\.0\.", layout.first_layer, canonical)


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
