"""A processor that announces more than it can do, and what is done about it before torch notices."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path

import torch

PROCESSOR_FACTS = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_BF16"
"""The most that oneDNN uses below AMX; its kernels fall back further by themselves where that is missing, too."""


def avoid_unusable_tiles() -> None:
    """Keep oneDNN from AMX where the processor lists it and using it ends the process (seen in virtual machines).

    There the first product of bfloat16 matrices dies of SIGILL: the hypervisor keeps back the CPUID leaf (0x1D) that
    says how tiles are laid out, so oneDNN configures none and then uses them. A product is tried in a child process;
    if that dies, `ONEDNN_MAX_CPU_ISA` is set. Nothing happens on other machines or where it is set already.
    To be called before torch multiplies anything: oneDNN reads its environment once, and a child of a process with
    threads may hang.
    """
    if LIMIT not in os.environ and _lists_tiles(PROCESSOR_FACTS) and not survives(_multiply_bfloat16):
        os.environ[LIMIT] = WITHOUT_TILES


def _lists_tiles(facts: Path) -> bool:
    try:
        return "amx_bf16" in facts.read_text(encoding="ascii", errors="replace").split()
    except OSError:  # no such file: not Linux
        return False


def _multiply_bfloat16() -> None:
    torch.set_num_threads(1)
    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(matrix, matrix)


def survives(work: Callable[[], None]) -> bool:
    """Whether a child process gets through `work` without being killed by a signal."""
    if not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # dying is an answer here, not a report
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)
