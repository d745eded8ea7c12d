"""When a call's tokens come, and the most memory it takes."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # proc(5): the resident set's peak begins anew


class TokenClock(BaseStreamer):
    """A `generate` streamer that notes when tokens are handed out."""

    takes_rows_apart = True  # of a batch: a row's block of tokens each time, as our loop writes them

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.moments.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between two times."""
        return tuple(later - earlier for earlier, later in pairwise(self.moments))


class PeakGauge:
    """Most memory between `reset` and `read`, weights included.

    CUDA: `torch.cuda.max_memory_allocated`. Elsewhere the process's resident set, where the kernel lets its peak be
    reset (Linux); `read` gives `None` where neither can be had.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._can_read = "VmHWM" in STATUS.read_text()
        except OSError:
            self._can_read = False

    def read(self) -> int | None:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._can_read:
            return None
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
