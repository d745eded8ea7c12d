"""Bytes of a model's weights: walked over the storages of a loaded one, or counted from shapes alone.

Shapes come from the model class itself, built on the meta device (no memory, no weights), so every architecture
transformers knows is counted exactly. Tied tensors count once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.hub import target_class
from ..errors import MemoryPlanError, first_line
from .quantization_schemes import Quantization

# Tensors that quantisers hang on a parameter or a module, outside parameters() and buffers().
_PARAMETER_EXTRAS = ("SCB", "CB")
_QUANT_STATE_TENSORS = ("absmax", "code", "offset")


def storage_bytes(model: nn.Module) -> int:
    """Bytes of every distinct storage behind a loaded model, scales and code tables of quantised weights included.

    `get_memory_footprint()` misses those, and reports the logical size of tensor subclasses.
    """
    sizes: dict[int, int] = {}
    for tensor in _all_tensors(model):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield from _plain_tensors(tensor)
        yield from _attached_tensors(tensor, _PARAMETER_EXTRAS)
        state = getattr(tensor, "quant_state", None)
        while state is not None:  # double quantisation nests one state in another
            yield from _attached_tensors(state, _QUANT_STATE_TENSORS)
            state = getattr(state, "state2", None)
    for module in model.modules():
        yield from _attached_tensors(getattr(module, "state", None), _PARAMETER_EXTRAS)


def _attached_tensors(owner: Any, names: Iterable[str]) -> Iterator[Tensor]:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, Tensor):
            yield from _plain_tensors(value)


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors a tensor subclass (torchao, quanto) is made of; a plain tensor is its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor


@dataclass(frozen=True)
class WeightTensor:
    """One parameter or buffer.

    Attributes:
        shape: a matrix is `(N, K)`, experts are `(E, N, K)`.
        dtype_bytes: `None` if it follows the model's dtype, else fixed (rotary tables are fp32).
        role: `"embedding"`, `"head"`, `"linear"` (weight of an `nn.Linear`), `"experts"`, `"expert_bias"`, `"other"`.
        module: name of the module that owns it.
    """

    module: str
    shape: tuple[int, ...]
    role: str
    dtype_bytes: int | None = None
    skipped_by_default: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        return self.shape[-2], self.shape[-1]


@dataclass(frozen=True)
class WeightInventory:
    """All distinct tensors of a model of one configuration."""

    tensors: tuple[WeightTensor, ...]
    num_parameters: int


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights under one quantisation.

    Attributes:
        packed: of matrices and experts the method packs, scales included.
        experts: of experts left unpacked.
        plain: of everything else.
        largest_packed: `(N, K)` of the largest packed matrix of an `nn.Linear`; `(0, 0)` if none is.
        largest_tensor: bytes of the largest packed tensor before packing: held for a moment while loading.
    """

    packed: int
    experts: int
    plain: int
    largest_packed: tuple[int, int] = (0, 0)
    largest_tensor: int = 0

    @property
    def total(self) -> int:
        return self.packed + self.experts + self.plain


def count_weights(inventory: WeightInventory, quantization: Quantization) -> WeightBytes:
    """Bytes of the weights as transformers would hold them under `quantization`."""
    rules, width = quantization.rules, quantization.dtype_bytes
    packed = experts = plain = largest_tensor = 0
    largest = (0, 0)
    for tensor in inventory.tensors:
        if _is_packed(tensor, quantization):
            rows, columns = tensor.matrix
            packed += math.prod(tensor.shape[:-2]) * quantization.matrix_bytes(rows, columns)
            largest_tensor = max(largest_tensor, tensor.elements * width)
            if tensor.role == "linear" and rows * columns > math.prod(largest):
                largest = rows, columns
        elif tensor.role == "experts":
            experts += tensor.elements * width
        elif tensor.role == "expert_bias" and rules.packs_experts:
            plain += tensor.elements * 4  # kept in fp32 beside packed experts
        else:
            plain += tensor.elements * (tensor.dtype_bytes or width)
    return WeightBytes(packed, experts, plain, largest, largest_tensor)


def _is_packed(tensor: WeightTensor, quantization: Quantization) -> bool:
    rules = quantization.rules
    if tensor.role == "experts":
        return rules.packs_experts
    if tensor.role not in ("linear", "head") or not rules.packs_linears:
        return False
    if quantization.skip_modules is None:
        return not tensor.skipped_by_default
    return not _names_module(quantization.skip_modules, tensor.module)


def _names_module(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of the patterns names the module: transformers matches from the start, or as a plain suffix."""
    return any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(key) for key in patterns)


def weight_inventory(config: PreTrainedConfig) -> WeightInventory:
    """Tensors of the model `AutoModelForCausalLM` makes of `config`.

    Raises:
        MemoryPlanError: transformers knows no causal language model for this configuration.
    """
    config_class: Any = type(config)
    return _inventory(config_class, config_json(config))


def config_json(config: PreTrainedConfig) -> str:
    """All fields; unlike transformers' own text of them it reads back as it was where one is infinite."""
    return json.dumps(config.to_dict(), default=str)


@lru_cache(maxsize=32)
def _inventory(config_class: Any, config_json: str) -> WeightInventory:
    return inventory_of(meta_model(config_class, config_json))


def meta_model(
    config_class: Any, config_json: str, dtype: torch.dtype = torch.bfloat16, attention: str | None = None
) -> PreTrainedModel:
    """The model `AutoModelForCausalLM` makes of a configuration, without memory for its weights.

    Args:
        dtype: of its activations.
        attention: its `attn_implementation`; `None`: what the configuration says, or transformers' own choice.

    Raises:
        MemoryPlanError: transformers knows no causal language model for this configuration.
    """
    # Its dtype would decide the model's, and shapes are those before packing.
    left_out = ("dtype", "torch_dtype", "quantization_config")
    fields = {name: value for name, value in json.loads(config_json).items() if name not in left_out}
    config = config_class.from_dict(fields)
    try:
        with torch.device("meta"):
            chosen = {} if attention is None else {"attn_implementation": attention}
            return target_class(config).from_config(config, dtype=dtype, **chosen).eval()
    except Exception as error:  # sizes may be wrong in any way
        raise MemoryPlanError(
            f"transformers makes no causal language model of this {type(config).__name__} "
            f"(model_type={config.model_type!r}): {first_line(error)[:200]}; give the config of a "
            "decoder-only language model"
        ) from error


def inventory_of(model: PreTrainedModel) -> WeightInventory:
    """Tensors of an unquantised model, real or on the meta device."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    parameters = dict(model.named_parameters())  # a tied tensor appears once, under its first name
    last = next(reversed(parameters), "")
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    tensors = []
    for name, module in model.named_modules():
        for key, tensor in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            if full_name not in parameters:
                continue
            role = _role(module, key, tensor, is_head=module is head, is_embedding=module is embedding)
            skipped = module is head or full_name == last or (tied and module is embedding)
            # A parameter the model itself keeps wider than its dtype (some routers) stays so.
            fixed = None if tensor.dtype == torch.bfloat16 else tensor.element_size()
            tensors.append(WeightTensor(name, tuple(tensor.shape), role, fixed, skipped))
        for tensor in module._buffers.values():
            if tensor is not None:
                tensors.append(WeightTensor(name, tuple(tensor.shape), "other", tensor.element_size()))
    return WeightInventory(tuple(tensors), sum(p.numel() for p in parameters.values()))


def _role(module: nn.Module, key: str, tensor: Tensor, *, is_head: bool, is_embedding: bool) -> str:
    if is_embedding:
        return "embedding"
    if is_head:
        return "head" if key == "weight" else "other"
    if type(module) is nn.Linear and key == "weight":
        return "linear"
    if "Experts" in type(module).__name__ and tensor.ndim >= 2:
        return "experts" if tensor.ndim == 3 else "expert_bias"
    return "other"
