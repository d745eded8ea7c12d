"""Recording what a step launches on a CUDA device, so that a step which cannot be recorded does no harm.

A capture fails if the step waits for the device. Before torch 2.13 a failed capture leaves the thread on the stream of
the capture, and the allocator in the belief that one is under way: `empty_cache` raises from then on, and so does every
allocation that runs out of memory (pytorch/pytorch#180395). So waits are looked for before anything is captured, and
what a capture begins is ended here, whatever happens in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.torch_internals import TorchDispatchMode, end_allocations


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


def capture_on_cuda(run: Run) -> Recording:
    """By a CUDA graph on the current device; see `CapturesOnCuda`. Other threads may go on using the device."""
    return _of_device(torch.cuda.current_device())(run)
