"""Steps as functions from tensors to tensors: what exporting and capturing want, and what their code is called by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .graph_makers import OtherInputsError, Step

Code = Callable[[list[Tensor]], list[Tensor]]


class LendsBuffers(Protocol):
    """What steps take as their cache: layers that are lent buffers, and the running block, if there is one.

    Attributes:
        takes_outputs: what a step gives is written over what was lent to it.
    """

    takes_outputs: bool

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def block(self) -> Any: ...

    def emptied(self) -> LendsBuffers: ...


class Look(NamedTuple):
    """What code asks of a tensor that it reads; `stride` `None`: any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        """Of a tensor such as this one."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class StepInputs(NamedTuple):
    """A step's inputs taken apart: their tensors, and how the rest is put together around them.

    Attributes:
        tensors: of the inputs, then keys and values or states of each layer, then slots of the running block, if any.
        leaves, spec: of all inputs but the cache, as pytree has them; a tensor's leaf is `None`.
        places: which leaves are tensors.
    """

    tensors: list[Tensor]
    leaves: list[Any]
    spec: Any
    places: list[int]

    @classmethod
    def of(cls, inputs: tuple) -> StepInputs:
        """Of what a step takes, its cache last."""
        *others, cache = inputs
        leaves, spec = pytree.tree_flatten(tuple(others))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places] + buffers_of(cache)
        return cls(tensors, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec, places)

    @property
    def num_own(self) -> int:
        """How many of the tensors, at the beginning, are not the cache's."""
        return len(self.places)

    @property
    def looks(self) -> list[Look]:
        """What code for these is made for."""
        return [Look.of(tensor) for tensor in self.tensors]


def buffers_of(cache: LendsBuffers) -> list[Tensor]:
    """Keys and values, or states, of each layer, then the slots of the running block if there are any."""
    held = [buffer for layer in cache.layers for buffer in layer.lent]
    slots = getattr(cache.block, "slots", None)
    return held if slots is None else [*held, slots]


def lend(cache: LendsBuffers, buffers: list[Tensor]) -> None:
    """Put in what `buffers_of` found, or other tensors in their places."""
    held = iter(buffers)
    for layer in cache.layers:
        layer.lend([next(held) for _ in layer.lent])
    for slots in held:
        cache.block.slots = slots


class FlatStep(nn.Module):
    """A step that takes tensors alone and gives tensors alone, as exporting and capturing want it.

    Args:
        step: what is computed.
        inputs: what it takes; the cache among them is lent to it.
        models: whose weights it reads.
    """

    def __init__(self, step: Step, inputs: tuple, models: nn.ModuleList):
        super().__init__()
        self.step, self.parts, self.cache = step, StepInputs.of(inputs), inputs[-1]
        self.models = models

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, (_, kept, spec, places) = iter(tensors), self.parts
        inputs = list(kept)
        for place in places:
            inputs[place] = next(leaves)
        lend(self.cache, list(leaves))
        outputs, _ = pytree.tree_flatten(self.step(*pytree.tree_unflatten(inputs, spec), self.cache))
        return tuple(output for output in outputs if isinstance(output, Tensor))


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
        *others, cache = inputs
        tensors = [*_tensors_in(others), *buffers_of(cache)]
        if not self.takes(tensors):
            raise OtherInputsError("the graph was made for inputs of other shapes, strides or precisions")
        with torch.no_grad():
            outputs = iter(self.code(tensors))
            if self._form is None:
                self._form = _emptied(self.step(*inputs))
        return _filled(self._form, outputs)

    def takes(self, tensors: list[Tensor]) -> bool:
        """Whether the code was made for such tensors, as `StepInputs` has them."""
        return len(tensors) == len(self._looks) and all(map(_looks_like, tensors, self._looks))


# What pytree does, for tuples and dicts alone: as it goes about it, it is a third of what a round costs the host.


def _tensors_in(inputs: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts, in pytree's order."""
    for each in inputs.values() if isinstance(inputs, dict) else inputs:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, list, dict)):
            yield from _tensors_in(each)


def _looks_like(tensor: Tensor, look: Look) -> bool:
    shape, stride, dtype = look
    return tensor.shape == shape and (stride is None or tensor.stride() == stride) and tensor.dtype is dtype


def _emptied(outputs: Any) -> Any:
    """These nested tuples with `_Place` for each tensor."""
    if isinstance(outputs, tuple):
        return _rebuilt(outputs, [_emptied(each) for each in outputs])
    return _Place if isinstance(outputs, Tensor) else outputs


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """What `_emptied` was given, with these tensors in their places."""
    if isinstance(form, tuple):
        return _rebuilt(form, [_filled(each, tensors) for each in form])
    return next(tensors) if form is _Place else form


def _rebuilt(form: tuple, parts: list[Any]) -> tuple:
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)


class _Place:
    """Where a tensor belongs."""
