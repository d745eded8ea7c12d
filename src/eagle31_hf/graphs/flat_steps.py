"""Steps as functions from tensors to tensors: what exporting and capturing want, and what their code is called by.

A step takes nested tuples and dicts of tensors, then its cache; what else is among them is built into its code. Taking
them apart as pytree does, of any type, would take a third of what a round costs the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache.placement import Placement
from .graph_makers import OtherInputsError, Step

Code = Callable[[list[Tensor]], list[Tensor]]


# --- what a step takes, taken apart -----------------------------------------------------------------------------------


def tensors_of(inputs: tuple) -> list[Tensor]:
    """Of what a step takes, its cache last: that one's buffers come last, too."""
    *others, cache = inputs
    return [*_tensors_in(others), *lent_by(cache)]


def num_own(inputs: tuple) -> int:
    """How many of `tensors_of`, at the beginning, are not the cache's."""
    return sum(1 for _ in _tensors_in(inputs[:-1]))


def lent_by(cache: Any) -> list[Tensor]:
    """Keys and values, or states, of each layer."""
    return [buffer for layer in cache.layers for buffer in layer.lent]


def lend(cache: Any, buffers: list[Tensor]) -> None:
    """Put in what `lent_by` found, or other tensors in their places."""
    held = iter(buffers)
    for layer in cache.layers:
        layer.lend([next(held) for _ in layer.lent])


def emptied(cache: Any) -> Any:
    """Its like that holds nothing until it is lent something, so that `cache` may go."""
    known: dict[int, Any] = {id(buffer): torch.empty(0) for buffer in lent_by(cache)}
    known[id(cache.placement)] = Placement(cache.placement.batch_size, cache.placement.block, torch.device("cpu"))
    return copy.deepcopy(cache, known)


def _tensors_in(inputs: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and dicts."""
    for each in inputs.values() if isinstance(inputs, dict) else inputs:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, dict)):
            yield from _tensors_in(each)


class _Place:
    """Where a tensor belongs."""


def _form_of(tree: Any) -> Any:
    """These nested tuples and dicts with `_Place` for each tensor."""
    return _mapped(tree, lambda leaf: _Place if isinstance(leaf, Tensor) else leaf)


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """What `_form_of` was given, with these tensors in their places."""
    return _mapped(form, lambda leaf: next(tensors) if leaf is _Place else leaf)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, tuple):
        parts = [_mapped(each, change) for each in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, dict):
        return {name: _mapped(each, change) for name, each in tree.items()}
    return change(tree)


# --- a step as code, and code as a step -------------------------------------------------------------------------------


class FlatStep(nn.Module):
    """A step that takes tensors alone and gives tensors alone, as exporting and capturing want it.

    Args:
        step: what is computed.
        inputs: what it takes; the cache among them is lent to it.
        models: whose weights it reads.
    """

    def __init__(self, step: Step, inputs: tuple, models: nn.ModuleList):
        super().__init__()
        self.step, self.cache, self.models = step, inputs[-1], models
        self._form = _form_of(inputs[:-1])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        inputs = _filled(self._form, left)
        lend(self.cache, list(left))
        return tuple(_tensors_in(self.step(*inputs, self.cache)))


class Look(NamedTuple):
    """What code asks of a tensor that it reads; `stride` `None`: any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        """Of a tensor such as this one."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        shape, stride, dtype = self
        return tensor.shape == shape and (stride is None or tensor.stride() == stride) and tensor.dtype is dtype


class ReshapedStep:
    """Code that knows tensors alone, in a step's place.

    Args:
        code: takes and gives lists of tensors.
        step: what it was made of; serves the first call, by which the outputs' form is known.
        looks: of the tensors that the code was made for.
    """

    def __init__(self, code: Code, step: Step, looks: list[Look]):
        self.code, self.step, self._looks = code, step, looks
        self._form: Any = None  # of the outputs

    def __call__(self, *inputs: Any) -> Any:
        """Raises `OtherInputsError` for inputs that the code was not made for."""
        tensors = tensors_of(inputs)
        if not self.takes(tensors):
            raise OtherInputsError("the graph was made for inputs of other shapes, strides or precisions")
        with torch.no_grad():
            outputs = iter(self.code(tensors))
            if self._form is None:
                self._form = _form_of(self.step(*inputs))
        return _filled(self._form, outputs)

    def takes(self, tensors: list[Tensor]) -> bool:
        """Whether the code was made for such tensors, as `tensors_of` gives them."""
        return len(tensors) == len(self._looks) and all(map(Look.fits, self._looks, tensors))
