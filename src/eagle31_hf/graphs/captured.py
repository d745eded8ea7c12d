"""Graphs without a compiler: what a step launches is recorded once, in the time of two eager runs, and replayed.

A recording reads and writes the very memory it was made with. So small inputs are copied into tensors of its own before
each replay, and keys and values lie where the last text's lay (`cache.kept_buffers`); a text that brings other ones is
recorded anew, which a few replays win back. What is computed is what eager code computes.

Only a CUDA device records launches. The tests let a CPU run the step again where a card would replay it.

On CUDA a capture fails if the step waits for the device. Before torch 2.13 a failed capture leaves the thread on the
stream of the capture, and the allocator in the belief that one is under way: `empty_cache` raises from then on, and so
does every allocation that runs out of memory (pytorch/pytorch#180395). So waits are looked for before anything is
captured, and what a capture begins is ended here, whatever happens in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.torch_internals import TorchDispatchMode, copy_all, end_allocations
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


class Recording(NamedTuple):
    """What was captured: `replay` computes `outputs` again, in place."""

    replay: Callable[[], None]
    outputs: Sequence[Tensor]


Run = Callable[[], Sequence[Tensor]]
"""A step on tensors that stay where they are."""


class HostWaitError(RuntimeError):
    """A step reads from the device what the host must know before it can go on."""


WAITING = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "_unique2"}
)
"""Operations of ATen whose value, or whose shape, the host has to wait for."""
INDEXING, COPYING = {"index", "index_put", "index_put_"}, {"copy_", "_to_copy"}
"""Those that wait for some arguments only."""


class ForbidsHostWaits(TorchDispatchMode):
    """Raises `HostWaitError` where this thread would wait for a device; other threads may.

    `torch.cuda.set_sync_debug_mode` would forbid it to all threads of the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in WAITING or (name in INDEXING and _selects_by_mask(args))
        if waits or (name in COPYING and _crosses_devices(args, kwargs or {})):
            raise HostWaitError(f"aten::{name} waits for the device, which a captured step must not")
        return func(*args, **(kwargs or {}))


def _selects_by_mask(args: tuple) -> bool:
    """How many elements are selected is known by the device alone."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _crosses_devices(args: tuple, kwargs: dict) -> bool:
    """A copy between device and host waits unless it is told not to."""
    if kwargs.get("non_blocking") or True in args[2:]:
        return False
    source = args[1] if len(args) > 1 else args[0]
    to = args[0].device if len(args) > 1 else torch.device(kwargs.get("device") or source.device)
    return bool(to.type != source.device.type)


class CapturesOnCuda:
    """Captures on one device, by one stream and into one memory pool.

    Recordings share the pool's memory, outputs included. So one thread at a time captures or replays, and copies the
    outputs before it is another's turn (`CapturedCode`); replays on several streams wait for each other.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._aside, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._replayed_on: torch.cuda.Stream | None = None

    def __call__(self, run: Run) -> Recording:
        """Record `run`.

        Raises:
            HostWaitError: it waits for the device; nothing was captured.
            RuntimeError: it does something else that cannot be captured. Stream and allocator are as before.
        """
        here = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(here)
        try:
            with torch.cuda.stream(self._aside):
                with ForbidsHostWaits():
                    run()  # libraries set themselves up, too, which must not be recorded
                graph, outputs = self._capture(run)
        finally:
            here.wait_stream(self._aside)
        return Recording(lambda: self._replay(graph), outputs)

    def _capture(self, run: Run) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # it says again that the capture failed
                graph.capture_end()
            with suppress(RuntimeError):  # it was ended: `capture_end` leaves it out before torch 2.13
                end_allocations(self._device, self._pool)
            raise
        return graph, outputs

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        here = torch.cuda.current_stream(self._device)
        if self._replayed_on is not None and self._replayed_on != here:
            here.wait_stream(self._replayed_on)  # what lies in the shared pool is still being read there
        graph.replay()
        self._replayed_on = here


@functools.cache
def _of_device(index: int) -> CapturesOnCuda:
    return CapturesOnCuda(torch.device("cuda", index))


# --- steps ------------------------------------------------------------------------------------------------------------

Capture = Callable[[Run], Recording]
"""Records what a step launches."""


CAPTURES: dict[str, Capture] = {"cuda": lambda run: _of_device(torch.cuda.current_device())(run)}
"""By type of device, on the current one. Other threads may go on using the device."""


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

    def make(self, key: GraphKey, step: Step, inputs: tuple, outputs: Any) -> Step:
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
