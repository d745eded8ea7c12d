"""What graphs have built in, as it is now: weights, the target's adapters, scalars and code, settings of the process.

A recording or a package does what the target did when it was made and asks nothing. So before every generation both are
looked at as a whole, quickly, and graphs of another state are let go. What changes a forward for the whole process are
hooks on all modules, functions that kernel packages replace where code looks them up (in modeling files and in
`torch.nn.functional`, before a model is loaded or after), modes that are open, and precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..cache.torch_internals import hooks_on_all_modules, open_modes

LIBRARIES = frozenset({__name__.partition(".")[0], "torch", "transformers", "accelerate", "peft"})
"""Whose code may hang on a target: what it does is known by its name and version."""

OF_LIBRARIES = frozenset({"safetensors", "packaging", "tqdm", "typing_extensions"})
"""What transformers' own files import functions from."""

ALWAYS_READ = ("torch", "torch.nn.functional", "transformers.integrations.sdpa_attention")
"""Files that a target's code looks functions up in, beside those that its classes stand in."""

PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
"""Types whose values say all there is to say, in every process."""

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
_WHERE_FROM = frozenset({"name_or_path", "_name_or_path", "_commit_hash", "transformers_version"})
"""Says where a model was loaded from, which is no difference."""
_OF_LOADING = frozenset({*_WHERE_FROM, "all_tied_weights_keys"})
"""Of a whole model; so is what is private to it."""


# --- the target -------------------------------------------------------------------------------------------------------


class ModelState:
    """A model as it is now. Two are equal if the model's forward does the same, so far as that can be seen.

    Attributes:
        told: types, scalars and names of code, the same in every process.
        hooks: of somebody else's code, which may do something else each time.
        replaced: forwards and functions of somebody else's code in the place of the model's own.
        autocast: the dtype that operations are cast to; empty while they are not.
    """

    def __init__(self, model: nn.Module):
        self.told: list[Any] = []
        self.hooks: list[str] = []
        self.replaced: list[str] = []
        self._here: list[Any] = []  # means something in this process alone
        self._held: list[object] = []  # compared by identity, and kept so that no other gets the same one
        self._configs: dict[int, PreTrainedConfig] = {}
        modules = list(model.modules())
        for module in modules:
            self._look_at(module)
        # On disk a configuration has a name of its own, so nothing of it is `told`.
        self._here += [repr(_fields_of(config)) for config in self._configs.values()]
        self.autocast = autocast_of(next(model.parameters(), None))
        self._look_at_process({type(module) for module in modules})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState):
            return NotImplemented
        same = self.told == other.told and self._here == other._here and len(self._held) == len(other._held)
        return same and all(map(is_, self._held, other._held))

    __hash__ = None  # type: ignore[assignment]

    def why_no_graph(self, *, recorded: bool = False) -> str:
        """Why a graph could not stand for what this model does; empty if it can.

        Args:
            recorded: by this process, which would notice if a function were exchanged; a hook it would not run again.
        """
        if self.autocast:  # a recording would read weights that were cast for it and are gone
            return f"autocast is on ({self.autocast}), and graphs compute in the dtype of the weights"
        if self.hooks:
            return f"a hook of somebody else's code sees the target ({self.hooks[0]}), and graphs would not run it"
        if self.replaced and not recorded:
            return f"the target computes by somebody else's code ({self.replaced[0]}), which graphs on disk cannot know"
        return ""

    def _look_at(self, module: nn.Module) -> None:
        kind: Any = type(module)
        names, is_foreign, is_model = _class_and_forward(kind, kind.forward)
        self.told += (names, module.training)
        self._held += (kind, kind.forward)
        if is_foreign:
            self.replaced.append(names)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._look_at_hook(hook)
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE or (is_model and (name[0] == "_" or name in _OF_LOADING)):
                continue
            self.told.append(name)
            self._tell(value, kind)

    def _look_at_process(self, kinds: set[type]) -> None:
        self._tell_of_object(nn.Module.__call__, nn.Module)
        for each in (*hooks_on_all_modules(), *open_modes()):
            self._look_at_hook(each)
        functions, replaced = functions_of(kinds)
        self._held += functions
        self.told += replaced
        self.replaced += replaced
        self.told += [self.autocast, *precision_of_products()]

    def _look_at_hook(self, hook: Callable) -> None:
        package = _package_of(hook)
        if package == __name__.partition(".")[0]:
            return  # the drafter's own
        self._held.append(hook)
        self.told.append(f"hook {_name_of(hook)}")
        if package not in LIBRARIES:
            self.hooks.append(_name_of(hook))

    def _tell(self, value: Any, kind: type) -> None:
        """`value` is an attribute of a module of this `kind`, or lies in one."""
        how = type(value)
        if how in PLAIN:
            self.told.append(value)
        elif isinstance(value, (list, tuple, Mapping)):
            self.told.append(len(value))
            for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
                self.told.append(str(name))
                self._tell(each, kind)
        elif isinstance(value, (set, frozenset)):
            self.told.extend(sorted(map(repr, value)))
        elif isinstance(value, PreTrainedConfig):
            self._configs[id(value)] = value
        elif isinstance(value, Tensor):
            self._here.append(version_of(value))
        elif isinstance(value, Enum):
            self.told.append(str(value))
        elif not isinstance(value, GenerationConfig):
            self._tell_of_object(value, kind)

    def _tell_of_object(self, value: Any, kind: type) -> None:
        is_code = callable(value) and not isinstance(value, (type, nn.Module))
        self.told.append(_name_of(value) if is_code else type(value).__qualname__)
        self._held.append(value)
        if is_code and _is_foreign_to(kind, value):
            self.replaced.append(_name_of(value))


def _fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says, those within it included."""
    fields = {name: value for name, value in vars(config).items() if name not in _WHERE_FROM}
    attention = fields.pop("_attn_implementation_internal", None)  # see `TargetBinding.masked_attention`
    inner = {name: _fields_of(value) for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    return fields | inner | {"attention": "eager" if attention == "eager" else "sdpa"}


@cache
def _class_and_forward(kind: type, forward: Callable) -> tuple[str, bool, bool]:
    """Names of both; whether the forward is neither of a library nor of the class's authors; whether it is a model."""
    name = _name_of(forward)
    return f"{kind.__qualname__} {name}", _is_foreign_to(kind, forward), issubclass(kind, PreTrainedModel)


def _package_of(code: Any) -> str:
    code = getattr(code, "func", code)  # of a `functools.partial`
    return str(getattr(code, "__module__", None)).partition(".")[0]


def _is_foreign_to(kind: type, code: Any) -> bool:
    """Whether it is neither of a library nor of those who wrote the class `kind`."""
    package = _package_of(code)
    return package not in LIBRARIES and package not in {each.__module__.partition(".")[0] for each in kind.__mro__}


def _name_of(code: Any) -> str:
    code = getattr(code, "func", code)
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


# --- the process ------------------------------------------------------------------------------------------------------


def functions_of(kinds: Iterable[type]) -> tuple[list[Any], list[str]]:
    """Functions of the files that these classes stand in, and of those that all code reads; and the names of those
    that are of somebody else's code."""
    held, replaced = list[Any](), list[str]()
    for file in sorted({kind.__module__ for kind in kinds} | {*ALWAYS_READ}):
        own = {*LIBRARIES, *OF_LIBRARIES, *sys.stdlib_module_names, file.partition(".")[0], "None"}
        for name, value in list(vars(sys.modules.get(file, ModuleType(file))).items()):
            if callable(value) and not isinstance(value, type):
                held.append(value)
                if _package_of(value) not in own:
                    replaced.append(f"{file}.{name}")
    return held, replaced


def autocast_of(tensor: Tensor | None) -> str:
    """What operations on the device of a tensor are cast to; empty while they are not."""
    device = "cpu" if tensor is None else tensor.device.type
    is_known = torch.amp.is_autocast_available(device)
    return str(torch.get_autocast_dtype(device)) if is_known and torch.is_autocast_enabled(device) else ""


def precision_of_products() -> list[str]:
    """What of the process's settings decides how products and attention are rounded; as torch sets them: nothing."""
    settings = {
        "float32": (torch.get_float32_matmul_precision(), "highest"),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), False),
        "fp16 sums": (cuda.matmul.allow_fp16_reduced_precision_reduction, True),
        "bf16 sums": (cuda.matmul.allow_bf16_reduced_precision_reduction, True),
        "flash": (cuda.flash_sdp_enabled(), True),
        "efficient": (cuda.mem_efficient_sdp_enabled(), True),
        "math": (cuda.math_sdp_enabled(), True),
    }
    return [f"{name}: {value}" for name, (value, usual) in settings.items() if value != usual]


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(*modules: nn.Module) -> list[Tensor]:
    """Parameters and buffers; those that several modules hold as often as that."""
    held = (of for part in nn.ModuleList(modules).modules() for of in (part._parameters, part._buffers))
    return [tensor for of in held for tensor in of.values() if tensor is not None]


CHUNK = 1024
"""Bytes whose sum is compared."""


class SeenWeights:
    """Weights as they were when this was made.

    Of the memory they lie in the sum of each chunk's words is compared: any one element changes it, and so do rows that
    change places, unless they share a chunk. What changes places within chunks, as columns do, leaves their sums alone,
    so a row in the middle is compared byte by byte. It takes as long as reading all weights from memory does.

    Args:
        weights: the tensors.
        by_content: read elements, too: writes through `.data`, as adapters are merged and rows of new tokens set,
            leave a tensor's version alone. The weights must be on the CPU.
    """

    def __init__(self, weights: Sequence[Tensor], *, by_content: bool):
        self._versions = [version_of(tensor) for tensor in weights]
        self._chunks: list[Tensor] = []  # views: words (n, CHUNK / 8)
        self._samples: list[Tensor] = []  # and bytes (n,)
        read = {tensor.untyped_storage().data_ptr(): tensor for tensor in weights} if by_content else {}
        for tensor in read.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            count, middle = len(memory) // CHUNK, len(memory) // 2
            self._chunks.append(memory[: count * CHUNK].view(count, CHUNK).view(torch.int64))
            row = tensor.element_size() * (sorted(tensor.stride())[1] if tensor.dim() > 1 else tensor.numel())
            self._samples += memory[count * CHUNK :], memory[max(middle - row, 0) : middle + row]
        self._contents = self._read()

    def are_still(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing was written to them."""
        if [version_of(tensor) for tensor in weights] != self._versions:
            return False
        return all(map(torch.equal, self._read(), self._contents))

    def _read(self) -> list[Tensor]:
        return [torch.cat([words.sum(-1) for words in self._chunks]), torch.cat(self._samples)] if self._chunks else []


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Where it lies, and how often it was written to in ways that torch counts."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
