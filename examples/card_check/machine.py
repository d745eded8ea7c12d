"""The device that is checked, and how time on it is measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Size = TypeVar("Size")


@dataclass(frozen=True)
class Machine:
    """Where steps run.

    Args:
        device: `"cuda"` or `"cpu"`.
        tiny: whether the script is tried and not the card.
    """

    device: str
    tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, real: Size, tiny: Size) -> Size:
        """Of something, where the card is checked and where the script is tried."""
        return tiny if self.tiny else real

    def check(self) -> None:
        """Raise a `RuntimeError` if there is no such device."""
        import torch

        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device here; --device cpu --tiny tries the script")

    def sync(self) -> None:
        """Wait until all that was launched is done."""
        import torch

        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody holds any more."""
        import torch

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

    def median_ms(self, work: Callable[[], Any], count: int = 20) -> float:
        """Median over `count` calls after three that are not counted."""
        for _ in range(3):
            work()
        return to_ms(statistics.median(self.seconds(work) for _ in range(count)))

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy, which is what weights can be read at."""
        import torch

        size = self.size(2**31, 2**16)
        source, place = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / (self.median_ms(lambda: place.copy_(source), 10) / 1e3 + 1e-9)

    def kernel_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds of the device for one of these calls, captured into one graph and replayed.

        Give several that read different memory, more than the device's cache holds. On a CPU they run once.
        """
        import torch

        from eagle31_hf.compiled.cuda_capture import capture_on_cuda

        if not self.is_cuda:
            return round(1e6 * self.seconds(lambda: [call() for call in calls]) / len(calls), 2)
        recording = capture_on_cuda(lambda: [call() for call in calls])
        recording.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(20):
            begin.record()
            recording.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return round(1e3 * statistics.median(times) / len(calls), 2)

    def peak_gib(self) -> float | None:
        """Most memory allocated since the last call; `None` where nobody counts."""
        import torch

        if not self.is_cuda:
            return None
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return round(peak, 2)


def to_ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
