"""Graphs without a compiler: what a step launches is recorded once, in the time of two eager runs, and replayed.

A recording reads and writes the very memory it was made with. So small inputs are copied into tensors of its own before
each replay, and keys and values lie where the last text's lay (`cache.kept_buffers`); a text that brings other ones is
recorded anew, which a few replays win back. What is computed is what eager code computes.

Only a CUDA device records launches. The tests let a CPU run the step again where a card would replay it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.torch_internals import copy_all
from .cuda_capture import Recording, capture_on_cuda
from .steps import (
    GraphKey,
    GraphMaker,
    RecordingFailedError,
    Step,
    buffers_of,
    over,
    tensors_in,
    with_tensors,
    without_tensors,
)

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

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        return CapturedStep(step, self.capture)


MOST_RECORDINGS = 4
"""Of one step, each for one cache: so many threads may write by it without recording it over and over."""


_ONE_THREAD_AT_A_TIME = threading.Lock()
"""From the inputs of a recording to the copy of its outputs: they share memory with the next one's."""


class _Recorded(NamedTuple):
    own: list[Tensor]  # what is read beside keys and values
    recording: Recording
    outputs: Any  # their form, without tensors


class CapturedStep:
    """Replays a step, recorded for each cache it is called with, which may want outputs written over its buffers."""

    def __init__(self, step: Step, capture: Capture):
        self._step, self._capture = step, capture
        self._recorded: dict[Hashable, _Recorded] = {}  # by what inputs look like, and where keys and values lie

    def __call__(self, *inputs: Any) -> Any:
        """Raises `RecordingFailedError`."""
        *others, cache = inputs
        small, buffers = list(tensors_in(others)), buffers_of(cache)
        looks = tuple([(tensor.shape, tensor.dtype) for tensor in small])
        place = looks, tuple([(buffer.data_ptr(), buffer.stride()) for buffer in buffers])
        with torch.no_grad(), _ONE_THREAD_AT_A_TIME:
            if place not in self._recorded:
                if len(self._recorded) == MOST_RECORDINGS:
                    del self._recorded[next(iter(self._recorded))]  # the oldest
                self._recorded[place] = self._record(others, cache, buffers)
            own, recording, form = self._recorded[place]
            _copy_all(own, small)
            recording.replay()
            outputs = list(recording.outputs)
            copies = buffers if cache.takes_outputs else [torch.empty_like(output) for output in outputs]
            _copy_all(copies, outputs)
        return with_tensors(form, iter(copies))

    def _record(self, others: Sequence[Any], cache: Any, buffers: Sequence[Tensor]) -> _Recorded:
        own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors_in(others)]
        inputs = *with_tensors(tuple(others), iter(own)), over(cache, buffers)  # which goes with its text
        form = None

        def run() -> list[Tensor]:
            nonlocal form
            outputs = self._step(*inputs)
            form = without_tensors(outputs)
            return [output.contiguous() for output in tensors_in(outputs)]

        try:
            return _Recorded(own, self._capture(run), form)
        except Exception as failure:  # whatever a step does that cannot be recorded, the text must go on
            raise RecordingFailedError("a step could not be recorded") from failure


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One launch for all: they are copied as bytes, since of several precisions `copy_all` copies each tensor by
    itself."""
    copy_all(_bytes_of(targets), _bytes_of([source.contiguous() for source in sources]))


def _bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]
