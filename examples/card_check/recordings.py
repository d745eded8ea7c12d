"""What is recorded, launched and waited for while something runs."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .machine import Machine, to_ms

HOST_CALLS = (
    "cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaStreamSync", "cudaDeviceSync",
    "cudaMalloc", "cudaFree", "cudaEventSync",
)  # fmt: skip


def allow_captures(machine: Machine, *, forbid_waits: bool = False) -> None:
    """Let a CPU stand in for a device that records launches, and let short texts be captured where sizes are tiny.

    Args:
        forbid_waits: fail where a step waits for the device, as a capture would.
    """
    from eagle31_hf.compiled import captured
    from eagle31_hf.compiled.cuda_capture import ForbidsHostWaits
    from eagle31_hf.decoding import kept_graphs
    from recorder import Recorder

    if machine.tiny:
        kept_graphs.FEWEST_CAPTURED_TOKENS = 1
    if machine.is_cuda:
        return
    record = Recorder()

    def record_if_possible(run: Callable[[], Any]) -> Any:
        with ForbidsHostWaits():
            run()
        return record(run)

    captured.CAPTURES["cpu"] = record_if_possible if forbid_waits else record


class Recordings:
    """Counts and times what is recorded while open.

    Attributes:
        seconds: of each recording.
    """

    def __init__(self, machine: Machine):
        self._machine = machine
        self.seconds: list[float] = []

    def __enter__(self) -> Recordings:
        from eagle31_hf.compiled.captured import CapturedCode

        self._made = made = CapturedCode._record

        def timed(code: Any, *given: Any) -> Any:
            self._machine.sync()
            started = time.perf_counter()
            recorded = made(code, *given)
            self._machine.sync()
            self.seconds.append(time.perf_counter() - started)
            return recorded

        CapturedCode._record = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        from eagle31_hf.compiled.captured import CapturedCode

        CapturedCode._record = self._made  # type: ignore[method-assign]

    def to_dict(self) -> dict[str, float]:
        return {"recorded": len(self.seconds), "recording_ms": to_ms(sum(self.seconds))}


def launches(machine: Machine, work: Callable[[], Any]) -> dict[str, Any]:
    """What the host sent and the device did while `work()` ran, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

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
    return {
        "host": calls,
        "kernels": kernels,
        "kernel_ms": round(slowest.total() / 1e3, 3),
        "slowest_us": {name: round(own_us) for name, own_us in slowest.most_common(8)},
    }


def waits(work: Callable[[], Any]) -> dict[str, int]:
    """How often the host waited for the CUDA device while `work()` ran, by the innermost line of ours or of
    transformers'."""
    import torch

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
