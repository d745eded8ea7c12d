"""What changes a target's forward for the whole process: hooks on all modules, functions replaced where its code looks
them up, modes that are open, precision.

Kernel packages replace functions in modeling files and in `torch.nn.functional`, before a model is loaded or after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

from ..cache.torch_internals import hooks_on_all_modules, open_modes

LIBRARIES = frozenset({__name__.partition(".")[0], "torch", "transformers", "accelerate", "peft"})
"""Whose code may hang on a target: what it does is known by its name and version."""

OF_LIBRARIES = frozenset({"safetensors", "packaging", "tqdm", "typing_extensions"})
"""What transformers' own files import functions from."""

ALWAYS_READ = ("torch", "torch.nn.functional", "transformers.integrations.sdpa_attention")
"""Files that a target's code looks functions up in, beside those that its classes stand in."""

MOST_STATES = 4
"""Of one file, which are known again when a replaced function is put back."""


class Functions:
    """The functions of one file as they are now; one object for each state of the file.

    Attributes:
        replaced: names of those that are of somebody else's code.
    """

    def __init__(self, file: ModuleType, names: tuple[str, ...], values: list[Any]):
        self._values = values
        own = {*LIBRARIES, *OF_LIBRARIES, *sys.stdlib_module_names, file.__name__.partition(".")[0]}
        found = zip(names, values, strict=True)
        self.replaced = [f"{file.__name__}.{name}" for name, value in found if _is_of_others(value, own)]

    def are(self, values: list[Any]) -> bool:
        return all(map(is_, self._values, values))


class _File:
    """A file and the names of its functions; those that are `None` may become one when a kernel is loaded."""

    def __init__(self, name: str):
        self._file, self._states = sys.modules[name], list[Functions]()
        kinds = FunctionType, BuiltinFunctionType, type(None)
        self._names = tuple(name for name, value in vars(self._file).items() if isinstance(value, kinds))

    def look(self) -> Functions:
        values = [*map(vars(self._file).get, self._names)]
        for state in self._states:
            if state.are(values):
                return state
        self._states[:] = [Functions(self._file, self._names, values), *self._states[: MOST_STATES - 1]]
        return self._states[0]


_file = cache(_File)


def functions_of(kinds: Iterable[type]) -> list[Functions]:
    """Of the files that these classes stand in, and of those that all code reads."""
    files = {kind.__module__ for kind in kinds} | {*ALWAYS_READ}
    return [_file(name).look() for name in sorted(files) if name in sys.modules]


def hooks_and_modes() -> list[Callable[..., Any]]:
    """Hooks that run on all modules, and modes that see every operation of this thread."""
    return [*hooks_on_all_modules(), *open_modes()]


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


def _is_of_others(value: Any, own: set[str]) -> bool:
    if isinstance(value, partial):
        value = value.func
    package = str(getattr(value, "__module__", None)).partition(".")[0]
    return package not in own and package != "None" and callable(value)
