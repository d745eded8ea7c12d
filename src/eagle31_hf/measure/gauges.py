"""What a call takes beside seconds: memory at its highest, energy, and when its tokens came. Asked of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..target.binding import TargetBinding

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # proc(5): the resident set's peak begins anew
RAPL = Path("/sys/class/powercap")


class TokenClock(BaseStreamer):
    """A `generate` streamer that notes when tokens are handed out, and how many at once."""

    takes_rows_apart = True  # of a batch: a row's block of tokens each time, as our loop writes them

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass

    @property
    def blocks(self) -> list[int]:
        """Tokens of each arrival but the first, which the prompt's forward gave."""
        return [count for _, count in self.arrivals[1:]]


class PeakGauge:
    """Most memory between `reset` and `read`, weights included.

    CUDA: `torch.cuda.max_memory_allocated`. Elsewhere the process's resident set, where the kernel lets its peak be
    reset (Linux). `source` names which; it is empty where neither can be had.
    """

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            self.source = "torch.cuda.max_memory_allocated"
        else:
            self.source = "resident set" if self._try_reset() else ""

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.source:
            self._try_reset()

    def read(self) -> int | None:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self.source:
            return None
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    @staticmethod
    def _try_reset() -> bool:
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            return "VmHWM" in STATUS.read_text()
        except OSError:
            return False


class EnergyGauge:
    """Joules since some moment: of the card by NVML, of the processor's packages by RAPL.

    `source` names what is counted; it is empty, and `read` gives `None`, where the machine does not tell.
    """

    def __init__(self, device: torch.device, rapl: Path = RAPL):
        counter = _nvml(device) if device.type == "cuda" else _rapl(rapl)
        self.source, self.read = counter or ("", lambda: None)


Counter = tuple[str, Callable[[], float | None]]


def _nvml(device: torch.device) -> Counter | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        # By what tells cards apart: NVML does not heed CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no such package, an old card, a container without rights: then nothing is said of energy
        return None
    return "NVML, the whole card", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def _rapl(folder: Path) -> Counter | None:
    packages = [RaplPackage(place) for place in sorted(folder.glob("intel-rapl:*")) if place.name.count(":") == 1]
    try:
        for package in packages:
            package.joules()
    except (OSError, ValueError):  # only root may read it on most machines
        return None
    return ("RAPL, processor packages", lambda: sum(p.joules() for p in packages)) if packages else None


class RaplPackage:
    """One package's counter, which begins anew at its range."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._last = self._before = 0  # microjoules, of the counter and of its whole turns

    def joules(self) -> float:
        now = int((self._folder / "energy_uj").read_text())
        if now < self._last:
            self._before += int((self._folder / "max_energy_range_uj").read_text())
        self._last = now
        return (self._before + now) / 1e6


class PassCounter:
    """Counts whole forwards of the target; those of an early exit are drafts, those of a compiled graph unseen."""

    def __init__(self, binding: TargetBinding):
        self.count = 0
        self._binding = binding
        self._layers = binding.text_config.num_hidden_layers

    @contextmanager
    def counting(self) -> Iterator[None]:
        handle = self._binding.model.register_forward_hook(self._after)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a number that changes would be compiled for again and again
            self.count += self._binding.text_config.num_hidden_layers == self._layers


@contextmanager
def ends_off(model: Any) -> Iterator[None]:
    """While open, no token ends a text."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = None
    try:
        yield
    finally:
        config.eos_token_id = before
