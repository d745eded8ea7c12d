"""A generation that goes on where memory runs out, and writes what it would have written.

The text is the state. What a failed draft or verification wrote lies beyond the caches' lengths and is forgotten; after
any other failure the caches are made anew and read the text again (`prefill`). So a failure costs time and one step
down, never a token:

    free             graphs, and what the allocator keeps back; once for each stage
    chunk            less of the prompt per forward, where it is read
    drop             no drafts for the rest of the call: one token per forward over the same cache

What was written in a round before anything was accepted is taken back, and tried again; from then on the round's tokens
stay in the text, and the caches catch up with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from transformers import DynamicCache

from ..errors import OutOfMemoryError, first_line, is_callers
from .carried_cache import CarriedCache
from .decoder import SpeculativeDecoder, Stage
from .pair import Pair

logger = logging.getLogger(__name__)

SMALLEST_CHUNK, CHUNK_DIVISOR = 32, 4
"""A chunk that failed may have cost a long read: four times smaller at once, and below 32 tokens nothing is saved."""

NOT_HANDED_OVER = "cache for the next turn given up"


class FallbackStep(Enum):
    """One thing to give up. The value is what `stats.memory_steps` counts it as."""

    FREE = "workspaces freed"
    CHUNK = "prefill chunk cut"
    DROP = "drafting stopped"


class RecoveringDecoder:
    """Drives a `SpeculativeDecoder` and goes on where memory runs out; see the module.

    The text is that of an undisturbed run, sampled or not: a round that is repeated chooses by the same noise.

    Args:
        decoder: has not begun yet.
    """

    def __init__(self, decoder: SpeculativeDecoder):
        self.decoder, self.request, self.sequences = decoder, decoder.request, decoder.sequences
        self._freed: set[Stage] = set()  # what comes back there will come back again
        self._snapshot = self.sequences.snapshot()

    def run(self) -> Tensor:
        """Write until every row must stop, within the decoder's `borrowing`. Returns `(B, L + n)` ids.

        Raises:
            OutOfMemoryError: nothing is left to give up.
        """
        decoder = self.decoder
        self._survive(decoder.prefill)
        decoder.stream()
        while decoder.rows:
            self._survive(decoder.step)
            decoder.stream()
        return decoder.finish()

    def _survive(self, action: Callable[[], None]) -> None:
        """Do it, with less and less where memory runs out."""
        self._snapshot = self.sequences.snapshot()
        cause: Exception | None = None
        while True:
            try:
                if cause is not None:
                    action = self._step_down(cause)
                return action()
            except Exception as error:
                if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                    raise
                # The frames of the failed call, and with them its tensors, must go before anything is tried again.
                cause = error.with_traceback(None)
                cause.__context__ = None

    # --- stepping down -------------------------------------------------------------------------------------------

    def _step_down(self, cause: Exception) -> Callable[[], None]:
        """Give something up, bring text and caches in order, and return what to do next."""
        decoder, stage = self.decoder, self.decoder.stage
        step = self._give_up()
        if step is None:
            raise OutOfMemoryError(self._exhausted_message(cause)) from cause
        self._free()
        self._report(step, cause)
        if stage is Stage.COMMIT:
            self._snapshot = self.sequences.snapshot()
        else:
            self.sequences.restore(self._snapshot)
        return decoder.step if stage in (Stage.DRAFT, Stage.VERIFY) else self._read_again

    def _give_up(self) -> FallbackStep | None:
        """Take the next step for a failure at this stage; `None` when nothing that helps there is left."""
        decoder, stage = self.decoder, self.decoder.stage
        if stage not in self._freed:
            self._freed.add(stage)
            return FallbackStep.FREE
        if stage is Stage.PREFILL:  # what was read may be less than a chunk
            chunk = decoder.chunk if decoder.reading is None else min(decoder.chunk, max(decoder.reading.to_read))
            if (smaller := max(chunk // CHUNK_DIVISOR, SMALLEST_CHUNK)) < chunk:
                decoder.chunk = smaller
                return FallbackStep.CHUNK
        if decoder.largest.depth > 0:
            decoder.stop_drafting()
            return FallbackStep.DROP
        return None

    def _free(self) -> None:
        """Let graphs go, which own memory of their own, and what an unfinished forward has written."""
        decoder = self.decoder
        decoder.drop_graphs()
        pair = Pair.of(decoder.drafter)
        if pair.graphs is not None:
            pair.graphs.drop("memory ran out, steps stay eager")
            pair.graphs = None
        decoder.caches.release()
        give_back_memory()

    def _report(self, step: FallbackStep, cause: Exception) -> None:
        self._count(step.value)
        left = f" to {self.decoder.chunk} tokens" if step is FallbackStep.CHUNK else ""
        where, why = self.decoder.stage.value, first_line(cause)[:160]
        logger.warning(
            "eagle31: memory ran out at %s (%s): %s%s; the text goes on unchanged", where, why, step.value, left
        )

    def _count(self, step: str) -> None:
        steps = self.request.stats.memory_steps
        steps[step] = steps.get(step, 0) + 1

    def _exhausted_message(self, cause: Exception) -> str:
        steps = ", ".join(f"{what} {n}x" for what, n in self.request.stats.memory_steps.items()) or "none"
        written = sum(len(new) for new in self.sequences.new)
        return (
            f"memory ran out at {self.decoder.stage.value} after {written} new tokens ({first_line(cause)[:160]}); "
            f"steps taken before: {steps}; none that helps there is left. Shorten the prompt or max_new_tokens "
            f"(together {self.sequences.rules.max_length}), take fewer rows than {self.sequences.batch_size}, load the "
            "target with fewer bits, or free memory that other programs hold; `eagle31 plan` shows what takes it and "
            "what fits"
        )

    def _read_again(self) -> None:
        """Go on over fresh caches for the rows whose caches are still needed; they grow by small steps."""
        decoder, live = self.decoder, set(self.sequences.live_rows())
        decoder.rows = [row for row in decoder.rows if row in live or self.request.carried is not None]
        if not decoder.rows:
            return
        decoder.chunk = max(decoder.chunk, min(SMALLEST_CHUNK, self.request.prefill_chunk or SMALLEST_CHUNK))
        decoder.renew_caches()
        decoder.caches.release()
        decoder.prefill()

    # --- the next turn -------------------------------------------------------------------------------------------

    def keep_for_next_turn(self, carried: CarriedCache, sequences: Tensor) -> DynamicCache | None:
        """`carried.close`; where memory runs out, the text is written and is not lost to its cache."""
        session, target = self.decoder.caches.drafter, self.decoder.caches.target
        try:
            if session is not None:
                session.catch_up()
            return carried.close(sequences, target, None if session is None else session.cache)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._count(NOT_HANDED_OVER)
        logger.warning("eagle31: memory ran out while the cache was handed back: the next turn reads its text again")
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
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(wording in said for wording in _WORDINGS)


def give_back_memory() -> None:
    """Let go of what nothing refers to: reference cycles, and blocks the allocator keeps back for later."""
    from accelerate.utils import release_memory  # takes its time

    release_memory()
