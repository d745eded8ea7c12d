"""A generation that goes on where memory runs out, and writes what it would have written.

The text is the state. Caches hold a prefix of it and can always be made to: what a failed forward wrote lies beyond
their lengths and is forgotten, and where a failure leaves one cache ahead of the other, both go back to what they have
in common and read the rest again (`prefill`). So a failure costs time and one step down (`memory_ladder`),
never a token.

    reading, draft, verify     nothing was accepted yet: what was written in this round is taken back, and tried again
    everything after           the round's tokens are in the text and stay there: the caches catch up with it
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor
from transformers import DynamicCache

from ..errors import OutOfMemoryError, UnsupportedGenerationError, first_line
from ..memory.apply_plan import run_ledger
from ..memory.ledger import MemorySettings
from .carried_cache import CarriedCache
from .decoder import SpeculativeDecoder
from .memory_ladder import SMALLEST_CHUNK, FallbackStep, MemoryLadder, Stage, give_back_memory, is_out_of_memory
from .pair import Pair
from .text import Snapshot

logger = logging.getLogger(__name__)

BEFORE_WRITING = (Stage.PREFILL, Stage.DRAFT, Stage.VERIFY)
NOT_HANDED_OVER = "cache for the next turn given up"


class RecoveringDecoder:
    """Drives a `SpeculativeDecoder` and goes on where memory runs out; see the module.

    The text is that of an undisturbed run, sampled or not: a round that is repeated chooses by the same noise.

    Args:
        decoder: has not begun yet.
    """

    def __init__(self, decoder: SpeculativeDecoder):
        self.decoder, self.request, self.sequences = decoder, decoder.request, decoder.sequences
        self.ladder = MemoryLadder(decoder.largest.depth > 0, decoder.chunk)
        self._held_rows = list(decoder.rows)  # rows the caches held when the running action began
        self._snapshot: Snapshot = self.sequences.snapshot()
        self._is_stale = False  # the caches cannot be brought back to any prefix of the text

    def run(self) -> Tensor:
        """As `SpeculativeDecoder.run`, within the decoder's `borrowing`.

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
        self._held_rows, self._snapshot = list(self.decoder.rows), self.sequences.snapshot()
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
        if stage is Stage.PREFILL and decoder.reading is not None:  # what was read may be less than a chunk
            longest = max(decoder.reading.to_read)
            self.ladder.chunk = min(decoder.chunk, longest)
        step = self.ladder.step_down(stage)
        if step is None:
            raise OutOfMemoryError(self._exhausted_message(cause)) from cause
        self._give_up(step)
        self._report(step, cause)
        if stage in BEFORE_WRITING:
            self.sequences.restore(self._snapshot)
        else:
            self._snapshot = self.sequences.snapshot()
        if stage in (Stage.DRAFT, Stage.VERIFY) and not self._is_stale:
            decoder.caches.forget_round()
            return decoder.step
        self._is_stale = self._is_stale or not self._return_to_common_prefix()
        return self._read_text

    def _give_up(self, step: FallbackStep) -> None:
        decoder = self.decoder
        if step is FallbackStep.DROP:
            decoder.caches.drafter, decoder.largest = None, decoder.largest.cut_to(0)
        elif step is FallbackStep.CHUNK:
            decoder.chunk = self.ladder.chunk
        self._free()

    def _free(self) -> None:
        """Let graphs, which own memory of their own, and workspaces go."""
        decoder = self.decoder
        if decoder.maker is not None:
            decoder.use_graphs(None)
        pair = Pair.of(decoder.drafter)
        if pair.graphs is not None:
            pair.graphs.drop("memory ran out, steps stay eager")
            pair.graphs = None
        decoder.caches.release()
        give_back_memory(self.sequences.prompts.device)

    def _report(self, step: FallbackStep, cause: Exception) -> None:
        steps = self.request.stats.memory_steps
        steps[step.value] = steps.get(step.value, 0) + 1
        left = f" to {self.ladder.chunk} tokens" if step is FallbackStep.CHUNK else ""
        logger.warning(
            "eagle31: memory ran out at %s (%s): %s%s; the text goes on unchanged",
            self.decoder.stage.value,
            first_line(cause)[:160],
            step.value,
            left,
        )

    def _exhausted_message(self, cause: Exception) -> str:
        steps = ", ".join(f"{what} {n}x" for what, n in self.request.stats.memory_steps.items()) or "none"
        written = sum(len(new) for new in self.sequences.new)
        rows, length = self.sequences.batch_size, self.sequences.rules.max_length
        settings = MemorySettings(
            context=self.request.start.before_prompts + length,
            batch=rows,
            draft_tokens=self.decoder.largest.depth,
            tree_size=self.decoder.largest.nodes if self.decoder.largest.is_tree else None,
            prefill_chunk=self.decoder.chunk,
            cache_type=self.request.stats.cache_type,
        )
        ledger = run_ledger(self.decoder.drafter, settings)
        return (
            f"memory ran out at {self.decoder.stage.value} after {written} new tokens ({first_line(cause)[:160]}); "
            f"steps taken before: {steps}; none that helps there is left. {ledger}Shorten the prompt or max_new_tokens "
            f"(together {length}), take fewer rows than {rows}, load the target with fewer bits, or free memory that "
            "other programs hold; `eagle31 plan` shows what fits"
        )

    # --- bringing text and caches in order -----------------------------------------------------------------------

    @property
    def _loaded(self) -> tuple[int, int]:
        """Tokens target and drafter had in their caches before the prompts' unread part."""
        start = self.request.start
        of_drafter = 0 if start.drafter is None else start.drafter.get_seq_length()
        return start.before_prompts + start.skip, of_drafter

    def _return_to_common_prefix(self) -> bool:
        """Cut both caches back to what both have read of the text. False if that cannot be had any more."""
        decoder, caches = self.decoder, self.decoder.caches
        if decoder.rows != self._held_rows:  # one of them may have let rows go already, or some of its layers
            decoder.rows = list(self._held_rows)
            return False
        of_target, of_drafter = self._loaded
        read = [length - of_target for length in caches.target.lengths]
        if caches.drafter is not None:
            paired = [length - of_drafter for length in caches.drafter.cache.lengths]
            read = [min(pair) for pair in zip(read, paired, strict=True)]
        # At least one token is read again: its logits are the next token's, or it renews the drafter's state.
        spare = 2 if caches.drafter is not None and self._has_begun else 1
        lengths = [len(self.sequences.text(row, self.request.start.skip)) for row in decoder.rows]
        held = [min(n, length - spare) for n, length in zip(read, lengths, strict=True)]
        # A prompt with pictures is read whole or not at all.
        least = [0] * len(held) if self.request.prompts is None else self.request.prompts.lengths(decoder.rows)
        if any(n < wanted for n, wanted in zip(held, least, strict=True)):
            return False
        try:
            caches.rollback([of_target + n for n in held], [of_drafter + n for n in held])
        except UnsupportedGenerationError:  # windows have slid
            return False
        return True

    @property
    def _has_begun(self) -> bool:
        return any(self.sequences.new[row] for row in self.decoder.rows)

    def _read_text(self) -> None:
        """Read what the caches do not hold of the text, then go on as after a prefill or a round."""
        decoder = self.decoder
        decoder.stage = Stage.PREFILL
        with decoder.clock.phase("prefill"):
            if self._is_stale:
                self._start_again()
            if not decoder.rows:
                return
            of_target, _ = self._loaded
            texts = [
                self.sequences.text(row, self.request.start.skip)[length - of_target :]
                for row, length in zip(decoder.rows, decoder.caches.target.lengths, strict=True)
            ]
            unread = 1 if self._has_begun else 0
            reading = decoder.read(texts, unread=unread)
            if unread:
                self._part_with_ended_rows()
            else:
                decoder.first_token(reading)

    def _start_again(self) -> None:
        """Fresh caches for the rows whose caches are still needed, holding what the turn began with."""
        decoder, start = self.decoder, self.request.start
        live = set(self.sequences.live_rows())
        needed = [row for row in decoder.rows if row in live or self.request.end is not None]
        with_drafter = decoder.caches.drafter is not None
        decoder.chunk = max(decoder.chunk, min(SMALLEST_CHUNK, self.request.prefill_chunk or SMALLEST_CHUNK))
        decoder.renew_caches(max(len(needed), 1), with_drafter=with_drafter)
        start.load(decoder.caches.target, decoder.caches.drafter)
        decoder.rows, self._held_rows, self._is_stale = needed, list(needed), False

    def _part_with_ended_rows(self) -> None:
        decoder = self.decoder
        decoder.stage = Stage.COMMIT
        staying = decoder.unfinished_rows()
        if not staying:
            decoder.rows = []
        elif len(staying) < len(decoder.rows):
            decoder.drop_rows(staying)

    # --- the next turn -------------------------------------------------------------------------------------------

    def keep_for_next_turn(self, carried: CarriedCache, sequences: Tensor) -> DynamicCache | None:
        """`carried.close`, tried twice where memory runs out: the text is written, and is not lost to its cache."""
        caches, steps = self.decoder.caches, self.request.stats.memory_steps
        for _ in range(2):
            try:
                session = caches.drafter
                if session is not None:
                    session.catch_up()
                return carried.close(sequences, caches.target, None if session is None else session.cache)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            caches.drafter = None  # what it has read may be more than it has noted
            give_back_memory(sequences.device)
        steps[NOT_HANDED_OVER] = steps.get(NOT_HANDED_OVER, 0) + 1
        logger.warning("eagle31: memory ran out while the cache was handed back: %s, it is empty", NOT_HANDED_OVER)
        return None
