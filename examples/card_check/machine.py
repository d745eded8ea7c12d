"""The device that is checked, how time on it is measured, and what the host sends it."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

Size = TypeVar("Size")
HOST_CALLS = (
    "cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaStreamSync", "cudaDeviceSync",
    "cudaMalloc", "cudaFree", "cudaEventSync",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where steps run: `"cuda"` or `"cpu"`; `tiny` where the script is tried and not the card."""

    device: str
    tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def accelerations(self) -> dict[str, str]:
        """How rounds can be computed here, by what that is called in findings."""
        return {"captured": "compile", "eager": "eager"} if self.is_cuda else {"eager": "eager"}

    def size(self, real: Size, tiny: Size) -> Size:
        """Of something, where the card is checked and where the script is tried."""
        return tiny if self.tiny else real

    def check(self) -> None:
        """Raise a `RuntimeError` if there is no such device."""
        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device here; --device cpu --tiny tries the script")

    def sync(self) -> None:
        """Wait until all that was launched is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what is no longer held."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], Any]) -> float:
        """What `work()` takes, until the device is done with it."""
        self.sync()
        started = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - started

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy, which is what weights can be read at."""
        size = self.size(2**31, 2**16)
        source, place = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        place.copy_(source)
        times = [self.seconds(lambda: place.copy_(source)) for _ in range(10)]
        return 2 * size / (statistics.median(times) + 1e-9)

    def about(self) -> dict[str, Any]:
        """Versions, and the card."""
        found: dict[str, Any] = {"torch": torch.__version__, "copies, TB/s": round(self.copy_bytes_per_s() / 1e12, 3)}
        if self.is_cuda:
            card = torch.cuda.get_device_properties(0)
            found |= {"card": card.name, "sm": f"{card.major}.{card.minor}", "gib": round(card.total_memory / 2**30, 1)}
            found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return found

    def peak_gib(self) -> float | None:
        """Most memory allocated since the last call; `None` without a card."""
        if not self.is_cuda:
            return None
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return round(peak, 3)


def to_ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


@contextmanager
def recordings() -> Iterator[Counter[str]]:
    """Counts CUDA graphs that are recorded while open, whatever records them, as `"recorded"`."""
    counted, begin = Counter[str](), torch.cuda.CUDAGraph.capture_begin

    def count(graph: Any, *args: Any, **kwargs: Any) -> Any:
        counted["recorded"] += 1
        return begin(graph, *args, **kwargs)

    with patch.object(torch.cuda.CUDAGraph, "capture_begin", count):
        yield counted


def launches(machine: Machine, work: Callable[[], Any]) -> dict[str, Any]:
    """What the host sent and the device did while `work()` ran, by torch's profiler."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.is_cuda
    with profile(activities=kinds) as profiled:
        work()
        machine.sync()
    calls: dict[str, int] = {}
    kernels, slowest = 0, Counter[str]()
    for event in profiled.key_averages():
        own_us = float(getattr(event, "self_device_time_total", 0) or 0)
        if event.key.startswith(HOST_CALLS):
            calls[event.key] = event.count
        elif own_us > 0 and str(getattr(event, "device_type", "")).endswith("CUDA"):
            kernels += event.count
            slowest[event.key[:70]] += own_us
    top = {name: round(own_us) for name, own_us in slowest.most_common(8)}
    return {"host": calls, "kernels": kernels, "kernel_ms": round(slowest.total() / 1e3, 3), "slowest_us": top}


def waits(work: Callable[[], Any]) -> dict[str, int]:
    """How often the host waited for the CUDA device while `work()` ran, by the innermost line of ours or of
    transformers'."""
    seen = Counter[str]()

    def hear(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if "eagle31_hf" in f.filename or "transformers" in f.filename]
        seen[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(seen.most_common(14))
