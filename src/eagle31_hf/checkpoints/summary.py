"""What `inspect` tells of a checkpoint without loading it, and which serving engines read it as it lies there."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .checks import FLOAT_DTYPES, Tensors
from .formats import (
    HS_INDEX,
    LATENT_ARCHITECTURES,
    LAYER_IDS,
    NESTED_LAYER_IDS,
    OTHER_LAYER_IDS,
    SGLANG_RULE,
    has_reduced_vocabulary,
    to_hs_indices,
)
from .json_files import get_path, shown
from .shapes import expected_shapes, packable_shapes

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine reads the files as they are. `reasons`: why not. `needs`: from which version, or a caution."""

    engine: str
    reads: bool
    reasons: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """Facts of a checkpoint from its headers and config alone.

    `tensors` maps stored names to shapes; `parameters` counts float tensors; `stored_bytes` all tensors.
    `aux_layers_as_stored` holds the layer ids as written, by place; `config.aux_layers` the same as `hs` indices.
    """

    source: str
    format: str
    format_title: str
    method: str
    config: Eagle31Config
    dtype: str
    parameters: int
    stored_bytes: int
    tensors: dict[str, tuple[int, ...]]
    aux_layers_as_stored: dict[str, list[int]]
    engines: tuple[EngineVerdict, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-ready values, the network's facts flattened beside the file's."""
        facts = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
                 "aux_norm", "norm_output", "norm_before_residual", "qk_norm", "fc_bias", "own_embedding",
                 "own_lm_head", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "aux_layers")  # fmt: skip
        return {
            **{name: value for name, value in vars(self).items() if name != "config"},
            **{fact: getattr(self.config, fact) for fact in facts},
            "tensors": {name: list(shape) for name, shape in self.tensors.items()},
            "engines": [asdict(verdict) for verdict in self.engines],
            "notes": list(self.notes),
        }


def count_parameters(tensors: Tensors, config: Eagle31Config, packed: Mapping[str, Tensors]) -> int:
    """Elements of all float tensors, and of the matrices `packed` as they were before."""
    scales = sum(math.prod(i.shape) for parts in packed.values() for i in parts.values() if i.dtype in FLOAT_DTYPES)
    shapes = packable_shapes(config)
    whole = sum(math.prod(shapes[module]) for module in packed)
    return sum(math.prod(info.shape) for info in tensors.values() if info.dtype in FLOAT_DTYPES) - scales + whole


def count_bytes(tensors: Tensors) -> int:
    """Bytes of all tensors as stored."""
    return sum(math.prod(info.shape) * _BYTES.get(info.dtype, 1) for info in tensors.values())


def caution_notes(
    format_name: str, config: Eagle31Config, id_places: Collection[str], unknown: Sequence[str], left_over: bool
) -> tuple[str, ...]:
    """What a file cannot tell for sure and only acceptance would show.

    Args:
        id_places: where it names layers. unknown: fields that nothing here knows.
        left_over: whether there is a `quantization_config` beside float weights.
    """
    notes = []
    if format_name == "specforge" and config.norm_output and config.aux_norm == "none":
        notes.append(
            "SpecForge before its fix #879 (2026-09) wrote norm_output=true for drafters trained with pre-norm "
            "feedback: if acceptance falls sharply after the first token, set norm_output to false"
        )
    if NESTED_LAYER_IDS in id_places and format_name in ("specforge", "modelopt"):
        notes.append(
            f"stored layer ids are read as SGLang does ({SGLANG_RULE}): hidden states {config.aux_layers}; if "
            "acceptance is near chance, try their neighbours"
        )
    if config.sliding_window is not None:
        notes.append(f"sliding window: the drafter sees {config.sliding_window} tokens back, as config.json says")
    if left_over:
        notes.append("config.json has a quantization_config, the weights are floats: it is the target's, and not read")
    if unknown:
        notes.append(
            f"nothing here knows what config.json says as {shown(list(unknown))}: kept, and without effect on what the "
            "drafter computes"
        )
    return tuple(notes)


# ---------------------------------------------------------------- engines


def engine_verdicts(
    stored: Mapping[str, Any], tensors: Tensors, config: Eagle31Config, format_name: str
) -> tuple[EngineVerdict, ...]:
    """vLLM's and SGLang's loaders applied on paper.

    Args:
        stored: `config.json` as it is. tensors: by stored name. config: the same, understood. format_name: its format.

    Sources: vLLM `llama_eagle3.py` and speculators config reader, SGLang `llama_eagle3.py` (both generations).
    """
    names = {re.sub(r"^midlayer\.", "layers.0.", name) for name in tensors} - {"t2d"}
    return (_vllm(stored, names, config, format_name), _sglang(stored, names, tensors, config, format_name))


def _verdict(engine: str, reasons: list[tuple[bool, str]], needs: list[tuple[bool, str]]) -> EngineVerdict:
    told = tuple(text for holds, text in reasons if holds)
    return EngineVerdict(engine, not told, told, tuple(text for holds, text in needs if holds))


def _architecture(stored: Mapping[str, Any]) -> str:
    return str((stored.get("architectures") or ["none"])[0])


def _shared_reasons(stored: Mapping[str, Any], config: Eagle31Config, speculators: bool) -> list[tuple[bool, str]]:
    prefix = "transformer_layer_config." if speculators else ""
    layers = get_path(stored, f"{prefix}num_hidden_layers")
    reduced = has_reduced_vocabulary(config)
    elsewhere = [path for path, _ in OTHER_LAYER_IDS if get_path(stored, path)]
    named_twice = any(get_path(stored, path) for path in (LAYER_IDS, NESTED_LAYER_IDS))
    return [
        (
            bool(elsewhere) and not named_twice,
            f"it does not look for layer ids in {', '.join(elsewhere)} and would take the default ones",
        ),
        (
            bool(stored.get("quantization_config")),
            "its matrices are packed in a layout of this package's own; write the unpacked drafter for it",
        ),
        (
            layers not in (None, config.num_hidden_layers),
            f"config.json says num_hidden_layers {layers}, the file holds {config.num_hidden_layers}; it builds as "
            "many as it is told",
        ),
        (not config.own_lm_head and reduced, "no lm_head for the reduced draft vocabulary: its head would be random"),
        (
            reduced and stored.get("draft_vocab_size") is None,
            "draft_vocab_size is not stated under that name, so the head would be built for the whole vocabulary",
        ),
    ]


def _vllm(stored: Mapping[str, Any], names: set[str], config: Eagle31Config, format_name: str) -> EngineVerdict:
    speculators = format_name == "speculators"
    grouped = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
    known = LATENT_ARCHITECTURES if config.is_latent else grouped
    unknown = sorted(names - expected_shapes(config).keys())
    as_is, nested = stored.get(LAYER_IDS), get_path(stored, NESTED_LAYER_IDS)
    ids = as_is or nested
    bad_ids = bool(ids) and to_hs_indices(ids, HS_INDEX) != config.aux_layers
    reasons = [
        (
            not speculators and _architecture(stored) not in known,
            f"architecture {_architecture(stored)} is unknown to it",
        ),
        (bool(unknown), f"it knows no tensors {unknown[:3]}{' …' if len(unknown) > 3 else ''}"),
        (
            config.qk_norm and not speculators,
            "its Llama class has no query/key norms; only the speculators layout does",
        ),
        (config.fc_bias, "its fc has no bias"),
        (config.is_latent and config.aux_norm == "concatenated", "its MLA class has no norm_before_fc"),
        (bad_ids, f"it takes layer ids {ids} as hidden states, but they mean {config.aux_layers}"),
        *_shared_reasons(stored, config, speculators),
    ]
    needs = [
        (
            config.aux_norm == "per_slot" or config.norm_output,
            "vLLM 0.22 (#42764)"
            + (" with #46488" if speculators else " with #43482" if config.is_latent else "")
            + " for the EAGLE 3.1 fields",
        ),
        (bool(nested) and not as_is, "a version that reads layer ids from eagle_config"),
        (config.num_aux_hidden_states != 3, "a version that reads num_aux_hidden_states"),
    ]
    return _verdict("vLLM", reasons, needs)


def _sglang(
    stored: Mapping[str, Any], names: set[str], tensors: Tensors, config: Eagle31Config, format_name: str
) -> EngineVerdict:
    ids: list[int] = get_path(stored, NESTED_LAYER_IDS) or stored.get(LAYER_IDS) or []
    bad_ids = bool(ids) and to_hs_indices(ids, SGLANG_RULE) != config.aux_layers
    biases = any(name.endswith(".bias") for name in names - {"fc.bias"})
    extra_norm = any(re.match(r"layers\.[1-9]\d*\.input_layernorm", name) for name in names)
    architecture = _architecture(stored)
    wanted = LATENT_ARCHITECTURES[0] if config.is_latent else "LlamaForCausalLMEagle3"
    reasons = [
        (format_name == "speculators", "it reads a flat config, not transformer_layer_config"),
        (
            format_name != "speculators" and architecture != wanted,
            f"architecture {architecture} is not {wanted}",
        ),
        (config.is_latent and config.num_hidden_layers > 1, "its MLA class has one layer"),
        (config.is_latent and config.aux_norm == "concatenated", "its MLA class has no norm_before_fc"),
        (config.norm_before_residual, "it has no norm_before_residual"),
        (config.qk_norm, "it drops query/key norms without a word"),
        (biases, "it drops attention and MLP biases without a word"),
        (extra_norm, "it expects hidden_norm, not input_layernorm, in further layers and drops the latter"),
        (stored.get("tie_word_embeddings") is True, "tie_word_embeddings would replace the draft head"),
        (
            not config.own_lm_head and ("draft_vocab_size" not in stored or stored["draft_vocab_size"] is not None),
            "without lm_head it needs draft_vocab_size: null, else the head would be random",
        ),
        (bad_ids, f"it takes layer ids {ids} as hidden states other than {config.aux_layers}"),
        *_shared_reasons(stored, config, format_name == "speculators"),
    ]
    older = bool(ids) and ids[0] != 1
    needs = [
        (config.aux_norm != "none" or config.norm_output, "a version that reads the EAGLE 3.1 fields (2026)"),
        (config.aux_norm == "concatenated", "SGLang with #32334 (2026-07) for norm_before_fc"),
        (not any("midlayer." in name for name in tensors), "a version that reads layers.0.* (older: random layer)"),
        (older, "a version with #25454 (2026-05): older ones shift every explicit layer id by one"),
        (
            config.own_embedding and config.target_hidden_size == config.hidden_size,
            "nothing, but it uses the target's embedding in place of this one",
        ),
    ]
    return _verdict("SGLang", reasons, needs)
