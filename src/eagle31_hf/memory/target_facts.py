"""What a memory plan must know of a target, read from its config, folder or the loaded model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..cache.spans import kinds_from_config
from ..checkpoints.files import refuse_drafter_as_target
from ..checkpoints.hub import can_be_hub_id
from ..errors import IncompatibleTargetError, MemoryPlanError
from .activation_bytes import DecoderShape
from .dry_run import forward_bytes
from .known_targets import close_names, find_known_target, known_targets
from .layer_sizes import sizes_by_layer, trained_context
from .quantization_schemes import AS_STORED, SCHEMES, Quantization, packed_as_stored, scheme
from .state_bytes import state_shape
from .weight_bytes import WeightBytes, count_weights, storage_bytes, weight_inventory

_REQUIRED_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FINGERPRINT_FIELDS = (*_REQUIRED_FIELDS, "model_type", "intermediate_size", "num_key_value_heads", "head_dim",
                       "tie_word_embeddings", "num_local_experts", "num_experts")  # fmt: skip
_LAYER_FIELDS = ("intermediate_size", "num_key_value_heads", "head_dim")  # no layer's own where layers differ
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class TargetFacts:
    """A target's share of a plan.

    Attributes:
        fingerprint: of its shape (not of its weights or quantisation).
        weights: bytes by kind; of a loaded model all are `plain`, as measured.
        loaded: the weights are in memory already.
    """

    name: str
    fingerprint: str
    quantization: Quantization
    weights: WeightBytes
    num_parameters: int
    shape: DecoderShape
    intermediate_size: int
    max_position_embeddings: int | None
    loaded: bool = False


def read_target(target: Any, quantization: Any = None, *, attention: str | None = None) -> TargetFacts:
    """Facts of a Hub id, a folder, a name of `known_targets`, a configuration or a loaded model.

    Args:
        quantization: scheme name or `quantization_config`; `None` takes what the config says, else its own dtype.
        attention: `attn_implementation`; `None` takes what the config says, else SDPA.

    Raises:
        MemoryPlanError: it cannot be found or read, or lacks a field (named).
    """
    if isinstance(target, nn.Module):
        if quantization is not None:
            raise MemoryPlanError(
                f"got quantization {quantization!r} for a loaded model, which is measured as it is; leave it out, or "
                "give the model's id to plan another form of it"
            )
        return _facts_of_model(target, attention)
    config = target if isinstance(target, PreTrainedConfig) else load_config(target)
    name = str(target) if isinstance(target, (str, Path)) else config.name_or_path or config.model_type
    packing = _packing(config, quantization)
    facts = _facts(name, config, packing, attention)
    if packing.method == AS_STORED:
        packed = replace(facts.weights, packed=_bytes_of_files(target, config), experts=0, plain=0)
        facts = replace(facts, weights=packed)
    return facts


def _bytes_of_files(target: Any, config: PreTrainedConfig) -> int:
    """Of the weights in a folder."""
    folder = Path(target) if isinstance(target, (str, Path)) else None
    files = [] if folder is None else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not files:
        raise MemoryPlanError(
            f"the weights of this {config.model_type!r} are packed in a way that is planned by the size of their "
            "files; give a folder that holds them, or the loaded model"
        )
    return sum(file.stat().st_size for file in files)


def _facts(name: str, config: PreTrainedConfig, packing: Quantization, attention: str | None) -> TargetFacts:
    _require_fields(config)
    inventory = weight_inventory(config)
    return TargetFacts(
        name=name,
        fingerprint=target_fingerprint(config),
        quantization=packing,
        weights=count_weights(inventory, packing),
        num_parameters=inventory.num_parameters,
        shape=decoder_shape(config, packing, attention),
        intermediate_size=max(layer.intermediate_size for layer in sizes_by_layer(config)),
        max_position_embeddings=trained_context(config),
    )


def _why_no_config(target: str, error: Exception) -> str:
    is_nowhere = not Path(target).exists() and not can_be_hub_id(target)
    why = "no such folder, and no possible Hub id" if is_nowhere else " ".join(str(error).split())[:160]
    close = close_names(target)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    return (
        f"got target {target!r}, whose config cannot be read ({why}){hint} wanted a folder with config.json, the id of "
        f"a model on the Hub that transformers knows without remote code, or one of {', '.join(known_targets())}"
    )


def load_config(target: Any) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder or a name of `known_targets`.

    Raises:
        MemoryPlanError: it cannot be found or read, or is a drafter's.
    """
    if not isinstance(target, (str, Path)):
        raise MemoryPlanError(
            f"got a {type(target).__name__} as target; wanted a Hub id, a folder, a config or a model"
        )
    known = None if Path(target).exists() else find_known_target(str(target))
    if known is not None:
        return known.config
    refuse_drafter_as_target(target)
    try:
        config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # a file may be wrong in any way
        raise MemoryPlanError(_why_no_config(str(target), error)) from error
    refuse_drafter_as_target(target, config.architectures)
    return config


def _require_fields(config: PreTrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    missing = [field for field in _REQUIRED_FIELDS if not isinstance(getattr(text, field, None), int)]
    if missing:
        raise MemoryPlanError(
            f"the {config.model_type!r} config lacks {missing}; a plan needs them: complete the config"
        )
    wrong = {field: getattr(text, field) for field in _REQUIRED_FIELDS if getattr(text, field) < 1}
    if wrong:
        raise MemoryPlanError(f"the {config.model_type!r} config has {wrong}; wanted at least 1 of each")


def _packing(config: PreTrainedConfig, quantization: Any) -> Quantization:
    text = config.get_text_config(decoder=True)
    dtype = _dtype_name(getattr(config, "dtype", None) or getattr(text, "dtype", None))
    own = getattr(config, "quantization_config", None)
    if quantization is None:
        if own and packed_as_stored(own):
            return Quantization(AS_STORED, dtype)
        return scheme(own, dtype) if own else SCHEMES[dtype]
    return scheme(quantization, dtype)


def _dtype_name(dtype: Any) -> str:
    """Of torch's, or of what a `config.json` calls it."""
    return _DTYPE_NAMES.get(str(dtype).removeprefix("torch."), "bf16")


def decoder_shape(config: PreTrainedConfig, packing: Quantization, attention: str | None = None) -> DecoderShape:
    """Activation and cache sizes of a model of this configuration.

    Raises:
        MemoryPlanError: it has layers that no draft can be verified on, or states that cannot be counted.
    """
    text = config.get_text_config(decoder=True)
    windows, attends, num_states = _kept_by_layer(text)
    layers = sizes_by_layer(text)
    widest = max(layers, key=lambda layer: layer.cached_heads * layer.cached_elements)
    sharing = getattr(text, "num_kv_shared_layers", None) or 0  # the last attend to others' keys
    keeping = len(layers) - sharing
    states = state_shape(config, packing.dtype_bytes) if any(num_states) else None
    columns = 0 if states is None else states.columns  # a chunk that goes on lies beside a convolution's window, too
    forward = forward_bytes(config, packing.dtype_bytes)
    return DecoderShape(
        hidden_size=text.hidden_size,
        q_heads=widest.attention_heads,
        kv_heads=widest.kv_heads,
        key_dim=widest.key_dim,
        value_dim=widest.value_dim,
        token_bytes=forward.token + columns,
        vocab_size=text.vocab_size,
        windows=windows,
        element_bytes=packing.dtype_bytes,
        score_bytes=_score_bytes(
            text.model_type, attention, getattr(text, "_attn_implementation", None), packing.dtype_bytes
        ),
        kv_by_layer=tuple(
            (layer.cached_heads, layer.cached_elements) if is_attention and index < keeping else (0, 0)
            for index, (layer, is_attention) in enumerate(zip(layers, attends, strict=True))
        ),
        states=states,
        logit_bytes=forward.logit,
        expanded_elements=widest.expanded_elements,
    )


def _kept_by_layer(text: PreTrainedConfig) -> tuple[tuple[int | None, ...], Sequence[bool], Sequence[int]]:
    """Of each layer: how far back it sees, whether it attends, how many states it keeps."""
    try:
        kept = kinds_from_config(text, None, 1)
    except IncompatibleTargetError as error:
        raise MemoryPlanError(str(error)) from error
    return tuple(kept.windows), kept.attends, kept.num_states


def _score_bytes(model_type: str, attention: str | None, configured: str | None, element_bytes: int) -> int:
    """What attention holds per score: nothing with a fused kernel."""
    if model_type == "gpt_oss" and attention in (None, "eager", "sdpa"):  # no SDPA path because of its sinks
        return 3 * element_bytes  # scores with the sink column, less their maximum, softmax in the same dtype
    implementation = attention or configured or "sdpa"
    return 3 * element_bytes + 4 if implementation == "eager" else 0  # scores, masked, fp32 softmax, its cast back


def target_fingerprint(config: PreTrainedConfig) -> str:
    """Identifies a target's shape: what a plan depends on besides the quantisation."""
    text = config.get_text_config(decoder=True)
    fields = {field: getattr(text, field, None) for field in _FINGERPRINT_FIELDS if field not in _LAYER_FIELDS}
    layers = set(sizes_by_layer(text))
    if len(layers) > 1:
        return digest(fields | {"layers": sorted(layers)})
    fields |= {field: getattr(text, field, None) for field in _LAYER_FIELDS}
    fields["head_dim"] = (
        fields["head_dim"] or text.hidden_size // text.num_attention_heads
    )  # not all have a field for it
    return digest(fields)


def digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _facts_of_model(model: nn.Module, attention: str | None) -> TargetFacts:
    base = getattr(model, "get_base_model", None)  # PEFT
    inner = base() if callable(base) else model
    config = getattr(inner, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise MemoryPlanError(
            f"got a {type(model).__name__} as target; wanted a transformers model, which has a config"
        )
    embedding: Any = inner.get_input_embeddings() if isinstance(inner, PreTrainedModel) else None
    dtype = _dtype_name(getattr(getattr(embedding, "weight", None), "dtype", None))
    name = getattr(inner, "name_or_path", "") or type(inner).__name__
    facts = _facts(name, config, replace(_packing(config, None), dtype=dtype), attention)
    measured = WeightBytes(0, 0, plain=storage_bytes(model), largest_packed=facts.weights.largest_packed)
    return replace(facts, weights=measured, loaded=True)
