"""What a memory plan must know of a target, read from its config, folder or the loaded model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..checkpoints.files import refuse_drafter_as_target
from ..checkpoints.hub import can_be_hub_id, missing_folder
from ..errors import MemoryPlanError, config_problem, first_line
from ..targets.fresh_drafter import trained_context
from .dry_run import DryRun, dry_run_of
from .known_targets import close_names, find_known_target
from .weights import DTYPES, SCHEMES, Quantization, WeightBytes, count_weights, scheme, storage_bytes

_DTYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
WEIGHT_FILES = (".safetensors", ".bin")  # the first kind that is there is loaded


@dataclass(frozen=True)
class TargetFacts:
    """A target's share of a plan.

    Attributes:
        weights: bytes by kind; of a loaded model all are `plain`, as measured.
        forward: counts what a forward of it takes.
        loaded: the weights are in memory already.
    """

    name: str
    quantization: Quantization
    weights: WeightBytes
    forward: DryRun
    loaded: bool = False

    @property
    def fingerprint(self) -> str:
        return self.forward.fingerprint

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.forward.model.parameters())

    @property
    def vocab_size(self) -> int:
        return int(self.forward.text.vocab_size)

    @property
    def max_position_embeddings(self) -> int | None:
        return trained_context(self.forward.text)


def read_target(target: Any, quantization: Any = None) -> TargetFacts:
    """Facts of a Hub id, a folder, a name of `known_targets`, a configuration or a loaded model.

    Args:
        quantization: scheme name or `quantization_config`; `None` takes what the config says, else its own dtype.

    Raises:
        MemoryPlanError: it cannot be found or read, or lacks a field (named).
    """
    if isinstance(target, nn.Module):
        if quantization is not None:
            raise MemoryPlanError(
                f"got quantization {quantization!r} for a loaded model, which is measured as it is; leave it out, or "
                "give the model's id to plan another form of it"
            )
        return _facts_of_model(target)
    config = target if isinstance(target, PreTrainedConfig) else load_config(target)
    name = str(target) if isinstance(target, (str, Path)) else config.name_or_path or config.model_type
    packing = _packing(config, quantization)
    facts = _facts(name, config, packing)
    if packing.is_as_stored:
        packed = replace(facts.weights, packed=_bytes_of_files(target, config), experts=0, plain=0)
        facts = replace(facts, weights=packed)
    return facts


def _bytes_of_files(target: Any, config: PreTrainedConfig) -> int:
    """Of the weights in a folder or on the Hub, which is asked for their sizes alone."""
    files: dict[str, int] = {}
    if isinstance(target, (str, Path)) and Path(target).is_dir():
        files = {file.name: file.stat().st_size for file in Path(target).iterdir()}
    elif isinstance(target, str) and can_be_hub_id(target):
        try:
            files = {file.path: getattr(file, "size", 0) for file in HfApi().list_repo_tree(target)}
        except Exception as error:  # the network may fail in any way
            raise MemoryPlanError(f"the Hub does not say how large the files of {target!r} are ({first_line(error)}); "
                                  "give a folder that holds them") from error  # fmt: skip
    by_kind = ([size for name, size in files.items() if name.endswith(kind)] for kind in WEIGHT_FILES)
    sizes = next(filter(None, by_kind), [])
    if not sizes:
        raise MemoryPlanError(
            f"the weights of this {config.model_type!r} are packed in a way that is planned by the size of their "
            "files; give a folder or Hub id that holds them, or the loaded model"
        )
    return sum(sizes)


def _facts(name: str, config: PreTrainedConfig, packing: Quantization) -> TargetFacts:
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise MemoryPlanError(f"the {config.model_type!r} config has num_hidden_layers={layers}; wanted at least 1")
    forward = dry_run_of(config, packing)
    return TargetFacts(name, packing, count_weights(forward.model, packing), forward)


def load_config(target: Any) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder or a name of `known_targets`.

    Raises:
        MemoryPlanError: it cannot be found or read, or is a drafter's.
    """
    if not isinstance(target, (str, Path)):
        raise MemoryPlanError(
            f"got a {type(target).__name__} as target; wanted a Hub id, a folder, a config or a model"
        )
    name = str(target)
    if not Path(target).exists():
        if (known := find_known_target(name)) is not None:
            return known
        if "/" not in name and (close := close_names(name)):  # no Hub id is alike
            raise MemoryPlanError(
                f"got target {name!r}, which is no folder and no name that plans know; did you mean "
                f"{' or '.join(close)}? Others go by folder or Hub id (owner/name)"
            )
        if missing := missing_folder(target):
            raise MemoryPlanError(missing)
    refuse_drafter_as_target(target)
    try:
        config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # a file may be wrong in any way
        why = config_problem(error).partition(". ")[0][:160]
        raise MemoryPlanError(
            f"got target {name!r}, whose config cannot be read ({why}); wanted a folder with config.json, the id of a "
            "model on the Hub that transformers knows without remote code, or a name such as 'Llama 3.1 8B', which "
            "needs no network"
        ) from error
    refuse_drafter_as_target(target, config.architectures)
    return config


def _packing(config: PreTrainedConfig, quantization: Any) -> Quantization:
    text = config.get_text_config(decoder=True)
    dtype = _dtype_name(getattr(config, "dtype", None) or getattr(text, "dtype", None))
    if quantization is None:
        return scheme(getattr(config, "quantization_config", None) or dtype, dtype)
    packing = scheme(quantization, dtype)
    if packing.is_as_stored:
        raise MemoryPlanError(
            f"got quantization of quant_method {packing.method!r}; weights packed so are planned by the size of their "
            f"files: plan the checkpoint that holds them, or name one of {', '.join(SCHEMES)}"
        )
    return packing


def _dtype_name(dtype: Any) -> str:
    """Of torch's, or of what a `config.json` calls it."""
    return _DTYPE_NAMES.get(str(dtype).removeprefix("torch."), "bf16")


def _facts_of_model(model: nn.Module) -> TargetFacts:
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
    facts = _facts(name, config, replace(_packing(config, None), dtype=dtype))
    measured = WeightBytes(0, 0, plain=storage_bytes(model), largest_packed=facts.weights.largest_packed)
    return replace(facts, weights=measured, loaded=True)
