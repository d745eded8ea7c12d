"""What a generation gives up, and in which order, when memory runs out. Pure: decides, frees nothing itself.

    free             workspaces, graphs and what the allocator keeps back; once for each stage
    chunk            less of the prompt per forward, where it is read
    drop             no drafts for the rest of the call: one token per forward over the same cache

None of them changes the text.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from enum import Enum

import torch

from ..errors import is_callers


class Stage(Enum):
    """Where in a generation memory ran out."""

    PREFILL = "reading the text (prefill)"
    DRAFT = "draft"
    VERIFY = "verify"
    COMMIT = "keeping what was accepted"


class FallbackStep(Enum):
    """One thing to give up. The value is what `stats.memory_steps` counts it as."""

    FREE = "workspaces freed"
    CHUNK = "prefill chunk cut"
    DROP = "drafting stopped"


SMALLEST_CHUNK, CHUNK_DIVISOR = 32, 4
"""A chunk that failed may have cost a long read: four times smaller at once, and below 32 tokens nothing is saved."""


@dataclass
class MemoryLadder:
    """The way down of one generation.

    Attributes:
        drafts: whether anything is drafted.
        chunk: prompt tokens per forward.
        freed: stages whose workspaces have been freed; what comes back there will come back again.
    """

    drafts: bool
    chunk: int
    freed: set[Stage] = field(default_factory=set)

    def step_down(self, stage: Stage) -> FallbackStep | None:
        """Take the next step for a failure at this stage; `None` when nothing that helps there is left."""
        if stage not in self.freed:
            self.freed.add(stage)
            return FallbackStep.FREE
        smaller = max(self.chunk // CHUNK_DIVISOR, SMALLEST_CHUNK)
        if stage is Stage.PREFILL and smaller < self.chunk:
            self.chunk = smaller
            return FallbackStep.CHUNK
        if self.drafts:
            self.drafts = False
            return FallbackStep.DROP
        return None


# --- recognising ------------------------------------------------------------------------------------------------------

# CUDA has an exception of its own; Metal and main memory have not, and CUDA's libraries word it their own way.
_WORDINGS = (
    "out of memory",  # "CUDA out of memory", "MPS backend out of memory", "HIP out of memory", "CUDA error: ..."
    "can't allocate memory",  # DefaultCPUAllocator on Linux and macOS
    "not enough memory",  # DefaultCPUAllocator on Windows
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "invalid buffer size",  # Metal: one buffer larger than it lends
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, on CUDA, Metal or a CPU, in our code; nothing else may be taken for it."""
    if is_callers(error):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return any(wording in said for wording in _WORDINGS)


def give_back_memory(device: torch.device) -> None:
    """Let go of what nothing refers to: reference cycles, and blocks the allocator keeps back for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
