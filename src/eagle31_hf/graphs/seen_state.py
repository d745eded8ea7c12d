"""What graphs have built in of a target beside its weights: adapters at work, scalars its code reads, that code itself,
and what holds for the whole process (`seen_process`).

A recording or a package does what the target did when it was made and asks nothing. So before every generation the
target is looked at as a whole, and graphs of another state are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .seen_process import LIBRARIES, autocast_of, functions_of, hooks_and_modes, precision_of_products
from .seen_weights import modules_of, version_of

PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
"""Types whose values say all there is to say, in every process."""

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
_WHERE_FROM = frozenset({"name_or_path", "_name_or_path", "_commit_hash", "transformers_version"})
"""Says where a model was loaded from, which is no difference."""
_OF_LOADING = frozenset({*_WHERE_FROM, "all_tied_weights_keys"})
"""Of a whole model; so is what is private to it."""


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
        modules = modules_of(model)
        for module in modules:
            self._look_at(module)
        for config in [*self._configs.values()]:
            self._look_at_config(config)
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
        held, plain = vars(module), PLAIN
        names, is_foreign, is_model = _class_and_forward(kind, kind.forward)
        self.told += (names, module.training)
        self._held += (kind, kind.forward)
        if is_foreign:
            self.replaced.append(names)
        if module._forward_pre_hooks or module._forward_hooks:  # most have none, and there are hundreds
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._look_at_hook(hook)
        for name, value in held.items():
            if name in _OF_EVERY_MODULE or (is_model and (name[0] == "_" or name in _OF_LOADING)):
                continue
            self.told.append(name)
            if type(value) in plain:
                self.told.append(value)
            else:
                self._tell(value, kind)

    def _look_at_process(self, kinds: set[type]) -> None:
        self._tell_of_object(nn.Module.__call__, nn.Module)
        for each in hooks_and_modes():
            self._look_at_hook(each)
        for functions in functions_of(kinds):
            self._held.append(functions)
            self.told += functions.replaced
            self.replaced += functions.replaced
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

    def _look_at_config(self, config: PreTrainedConfig) -> None:
        """On disk a configuration has a name of its own, so nothing of it is `told`."""
        told, self.told = self.told, []
        for name, value in vars(config).items():
            if name == "_attn_implementation_internal":  # see `TargetBinding.masked_attention`
                self.told.append("eager" if value == "eager" else "sdpa")
            elif isinstance(value, PreTrainedConfig):
                if id(value) not in self._configs:
                    self._configs[id(value)] = value
                    self._look_at_config(value)
            elif name not in _WHERE_FROM:
                self.told.append(name)
                self._tell(value, type(config))
        self._here += self.told
        self.told = told


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
