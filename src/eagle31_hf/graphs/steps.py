"""Steps that graphs compute: what tells their graphs apart, who makes these, and the tensors that steps take and give.

A step takes nested tuples and dicts of tensors, then its cache, and gives such a tuple; what else is among them is
built into its graph. Taking them apart as pytree does, of any type, would take a third of what a round costs the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

Step = Callable[..., Any]


class OtherInputsError(Exception):
    """A graph was called with inputs that it was not made for; eager code serves them."""


class RecordingFailedError(Exception):
    """A step could not be recorded, for the first time or again; eager code serves what it was to compute."""


class GraphKey(NamedTuple):
    """What tells graphs of one pair of models apart.

    Attributes:
        kind: of step.
        rows: batch size.
        size: tokens or nodes it is about.
        shape: whatever else its inputs' shapes depend on.
        sampling: how tokens are chosen in it; `None` where none are.
    """

    kind: str
    rows: int
    size: int
    shape: tuple = ()
    sampling: Hashable = None


class GraphMaker:
    """Where graphs come from that are not there yet: from nowhere, so that only those are used that are there.

    Attributes:
        exact_sizes: making one takes so little that blocks are not padded to sizes that many rounds share.
        failure: what is said where it could not make one.
    """

    failure = ""
    exact_sizes = False

    def can_make(self, key: GraphKey) -> bool:
        """Whether it has, or would make, the graph of `key`; the same throughout a generation."""
        return False

    def make(self, key: GraphKey, step: Step, inputs: tuple, outputs: Any) -> Step:
        """The graph of `step`, which gives such outputs of these inputs. May raise anything."""
        raise NotImplementedError


# --- the tensors of what a step takes and gives -----------------------------------------------------------------------


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Of nested tuples and dicts, in one order always."""
    for each in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, dict)):
            yield from tensors_in(each)


def with_tensors(nested: Any, tensors: Iterator[Tensor]) -> Any:
    """These nested tuples and dicts with other tensors, in the order of `tensors_in`."""
    if isinstance(nested, Tensor):
        return next(tensors)
    if isinstance(nested, tuple):
        parts = [with_tensors(each, tensors) for each in nested]
        return type(nested)(*parts) if hasattr(nested, "_fields") else tuple(parts)
    if isinstance(nested, dict):
        return {name: with_tensors(each, tensors) for name, each in nested.items()}
    return nested


def without_tensors(nested: Any) -> Any:
    """What `with_tensors` fills again."""
    return with_tensors(nested, repeat(torch.empty(0)))


def buffers_of(cache: Any) -> list[Tensor]:
    """Keys and values, or states, of each layer of a step's cache."""
    return [buffer for layer in cache.layers for buffer in layer.step_buffers]


def over(cache: Any, buffers: Sequence[Tensor]) -> Any:
    """A step's cache like this one, over other buffers in the places of `buffers_of`."""
    known: dict[int, Any] = {id(old): new for old, new in zip(buffers_of(cache), buffers, strict=True)}
    placement = cache.placement
    known[id(placement)] = type(placement)(placement.batch_size, placement.block, torch.device("cpu"))
    return copy.deepcopy(cache, known)
