"""What a generation gives up, and in which order, when memory runs out. Pure: decides, frees nothing itself.

    free             workspaces, graphs and what the allocator keeps back
    shorten          a tree becomes a chain, a chain half as long
    chunk            less of the prompt per forward
    drop             no drafter for the rest of the call: one token per forward over the same cache
    host             keys and values of the target's cache live in main memory

None of them changes the text. What helps depends on where memory ran out, so every stage has its own way down.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
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
    SHORTEN = "draft shortened"
    CHUNK = "prefill chunk cut"
    DROP = "drafting stopped"
    HOST = "cache moved to main memory"


FALLBACKS = {
    Stage.PREFILL: (FallbackStep.FREE, FallbackStep.CHUNK, FallbackStep.DROP, FallbackStep.HOST),
    Stage.DRAFT: (FallbackStep.FREE, FallbackStep.SHORTEN, FallbackStep.DROP, FallbackStep.HOST),
    Stage.VERIFY: (FallbackStep.FREE, FallbackStep.SHORTEN, FallbackStep.DROP, FallbackStep.HOST),
    Stage.COMMIT: (FallbackStep.FREE, FallbackStep.SHORTEN, FallbackStep.DROP, FallbackStep.HOST),
}

SMALLEST_CHUNK, CHUNK_DIVISOR = 32, 4
"""A chunk that failed may have cost a long read: four times smaller at once, and below 32 tokens nothing is saved."""


@dataclass(frozen=True)
class Budget:
    """What a generation still has to give.

    Attributes:
        draft_tokens: depth of a draft; 0 without a drafter.
        is_tree: whether drafts are trees.
        chunk: prompt tokens per forward.
        on_device: whether the cache lies on a device that has a host beside it.
    """

    draft_tokens: int
    is_tree: bool
    chunk: int
    on_device: bool = False

    def after(self, step: FallbackStep) -> Budget | None:
        """What is left after this step; `None` if there is nothing to take it from."""
        if step is FallbackStep.SHORTEN:
            return self._shortened()
        if step is FallbackStep.CHUNK:
            return replace(self, chunk=self._smaller_chunk) if self._smaller_chunk < self.chunk else None
        if step is FallbackStep.DROP:
            return replace(self, draft_tokens=0, is_tree=False) if self.draft_tokens else None
        if step is FallbackStep.HOST:
            return replace(self, on_device=False) if self.on_device else None
        return self

    def _shortened(self) -> Budget | None:
        if self.is_tree:
            return replace(self, is_tree=False)
        return replace(self, draft_tokens=self.draft_tokens // 2) if self.draft_tokens > 1 else None

    @property
    def _smaller_chunk(self) -> int:
        return max(self.chunk // CHUNK_DIVISOR, SMALLEST_CHUNK)


@dataclass
class FallbackPolicy:
    """The way down of one generation.

    Attributes:
        budget: what is left to give.
        freed: stages whose workspaces have been freed; what comes back there will come back again.
    """

    budget: Budget
    freed: set[Stage] = field(default_factory=set)

    def step_down(self, stage: Stage) -> FallbackStep | None:
        """Take the next step for a failure at this stage; `None` when nothing that helps there is left."""
        for step in FALLBACKS[stage]:
            left = self.budget.after(step)
            if left is None or (step is FallbackStep.FREE and stage in self.freed):
                continue
            if step is FallbackStep.FREE:
                self.freed.add(stage)
            self.budget = left
            return step
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
