"""Graphs without a compiler: what a step launches is recorded once, in the time of two eager runs, and replayed.

A recording reads and writes the very memory it was made with. So small inputs are copied into tensors of its own before
each replay, and keys and values lie where the last text's lay (`cache.kept_buffers`); a text that brings other ones is
recorded anew, which a few replays win back. What is computed is what eager code computes.

Only a CUDA device records launches. The tests let a CPU run the step again where a card would replay it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache.torch_internals import copy_all
from .cuda_capture import Recording, capture_on_cuda
from .flat_steps import FlatStep, Look, ReshapedStep, emptied, lend, num_own, tensors_of
from .graph_makers import GraphKey, GraphMaker, RecordingFailedError, Step

Capture = Callable[[Callable[[], Sequence[Tensor]]], Recording]
"""Records what a function without arguments launches."""


CAPTURES: dict[str, Capture] = {"cuda": capture_on_cuda}
"""By type of device."""


@dataclass(frozen=True)
class CapturesSteps(GraphMaker):
    """A `GraphMaker` that compiles nothing.

    Args:
        capture: of the device at hand.
    """

    capture: Capture
    failure = "capturing failed"
    exact_sizes = True
    weights_seen = True  # to know whether it may

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        looks = [Look.of(tensor) for tensor in tensors_of(inputs)]
        own = num_own(inputs)
        looks[own:] = [look._replace(stride=None) for look in looks[own:]]  # of buffers of any length
        return ReshapedStep(CapturedCode(step, inputs, self.capture), step, looks)


MOST_RECORDINGS = 4
"""Of one step, each for one cache: so many threads may write by it without recording it over and over."""


_ONE_THREAD_AT_A_TIME = threading.Lock()
"""From the inputs of a recording to the copy of its outputs: they share memory with the next one's."""


class CapturedCode:
    """A step as `Code`, recorded for each cache it is called with, which may want outputs written over what it lends.

    Args:
        step: to be recorded.
        inputs: what it takes; say how tensors are put together to inputs.
    """

    def __init__(self, step: Step, inputs: tuple, capture: Capture):
        *others, cache = inputs
        self._flat = FlatStep(step, (*others, emptied(cache)), nn.ModuleList())
        self._num_own, self._capture, self._over_lent = num_own(inputs), capture, cache.takes_outputs
        self._recorded: dict[tuple[tuple, ...], _Recorded] = {}  # by where keys, values and states lie

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        small, lent = tensors[: self._num_own], tensors[self._num_own :]
        place = tuple([(tensor.data_ptr(), tensor.stride()) for tensor in lent])
        with _ONE_THREAD_AT_A_TIME:
            if place not in self._recorded:
                if len(self._recorded) == MOST_RECORDINGS:
                    del self._recorded[next(iter(self._recorded))]  # the oldest
                self._recorded[place] = self._record(small, lent)
            own, recording = self._recorded[place]
            _copy_all(own, small)
            recording.replay()
            outputs = list(recording.outputs)
            copies = lent if self._over_lent else [torch.empty_like(output) for output in outputs]
            _copy_all(copies, outputs)
            return copies

    def _record(self, small: Sequence[Tensor], lent: Sequence[Tensor]) -> _Recorded:
        own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in small]
        try:
            return _Recorded(own, self._capture(lambda: [output.contiguous() for output in self._flat(*own, *lent)]))
        except Exception as failure:  # whatever a step does that cannot be recorded, the text must go on
            raise RecordingFailedError("a step could not be recorded") from failure
        finally:
            lend(self._flat.cache, [torch.empty(0)] * len(lent))  # keys and values go with their text


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One launch for all: they are copied as bytes, since of several precisions `copy_all` copies each tensor by
    itself."""
    copy_all(_bytes_of(targets), _bytes_of([source.contiguous() for source in sources]))


def _bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


class _Recorded(NamedTuple):
    own: list[Tensor]  # what is read beside keys and values
    recording: Recording
