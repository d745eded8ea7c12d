"""A generation that goes on where memory runs out, and writes what it would have written.

The text is the state. Caches hold a prefix of it and can always be made to: what a failed forward wrote lies beyond
their lengths and is forgotten, and where a failure leaves one cache ahead of the other, both go back to what they have
in common and read the rest again (`reading`). So a failure costs time and one step down the ladder (`memory.ladder`),
never a token.

    reading, draft, verify     nothing was accepted yet: what was written in this round is taken back, and tried again
    everything after           the round's tokens are in the text and stay there: the caches catch up with it
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache

from .conversation import Conversation
from .decoding import SpeculativeDecoder
from .decoding_request import DecodingRequest
from .drafter import Eagle31Drafter
from .errors import OutOfMemoryError, UnsupportedGenerationError
from .memory.ladder import SMALLEST_CHUNK, Ladder, Means, Rung, Stage, give_back_memory, is_out_of_memory
from .memory.ledger import MemorySettings
from .memory.obedience import run_ledger
from .reading import Reading
from .sequences import SequencesMark
from .stats import SpeculationStats
from .verification import Verification

logger = logging.getLogger(__name__)

BEFORE_WRITING = (Stage.READ, Stage.DRAFT, Stage.VERIFY)
HOST = torch.device("cpu")


class RecoveringDecoder(SpeculativeDecoder):
    """See the module; arguments are `SpeculativeDecoder`'s.

    Greedy text is that of an undisturbed run. Sampled text follows the same distribution; under a fixed seed it is
    another draw, since random numbers that a failed round has used are not used again.
    """

    def __init__(self, drafter: Eagle31Drafter, request: DecodingRequest):
        super().__init__(drafter, request)
        on_device = self.sequences.prompts.device.type != "cpu"
        means = Means(self.shape.depth, self.shape.is_tree, self.chunk, request.end is not None, on_device)
        self.ladder = Ladder(means)
        self._on_host = False
        self._held_rows = list(self.rows)  # rows the caches held when the running action began
        self._mark: SequencesMark = self.sequences.mark()
        self._is_stale = False  # the caches cannot be brought back to any prefix of the text

    def run(self) -> Tensor:
        self._survive(self._prefill)
        self._stream()
        while self.rows:
            self._survive(self._round)
            self._stream()
        return self._finish()

    def _survive(self, action: Callable[[], None]) -> None:
        """Do it, with less and less where memory runs out.

        Raises:
            OutOfMemoryError: nothing is left to give up.
        """
        self._held_rows, self._mark = list(self.rows), self.sequences.mark()
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
        rung = self.ladder.step_down(self.stage)
        if rung is None:
            raise OutOfMemoryError(self._why_not_on(cause)) from cause
        self._give_up(rung)
        self._report(rung, cause)
        if self.stage in BEFORE_WRITING:
            self.sequences.rewind(self._mark)
        else:
            self._mark = self.sequences.mark()
        if self.stage in (Stage.DRAFT, Stage.VERIFY) and not self._is_stale:
            self._roll_back(self.cache.lengths, [] if self.session is None else self.session.cache.lengths)
            return self._round
        self._is_stale = self._is_stale or not self._return_to_common_prefix()
        return self._read_text

    def _give_up(self, rung: Rung) -> None:
        means = self.ladder.means
        if rung is Rung.DROP:
            self.session = None
        if rung in (Rung.SHORTEN, Rung.DROP):
            self._set_shape(self.shape.reduced_to(means.draft_tokens, is_tree=means.is_tree))
        elif rung is Rung.CHUNK:
            self.chunk = means.chunk
        elif rung is Rung.FORGET:
            self.request.end = None
        elif rung is Rung.HOST:
            self.request.end, self._on_host = None, True  # what lies in main memory is of no use to the next turn
            self.cache.move_to(HOST)
        self._free()

    def _free(self) -> None:
        if self.compiles:
            # Graphs own memory of their own, and their inputs have a fixed size.
            self.compiles, self.judge_at_once = False, None
            self.verify = Verification(self.binding, self.cache)
            if self.binding.compiled is not None:
                self.binding.compiled.drop("memory ran out, steps stay eager")
                self.binding.compiled = None
        self.cache.release()
        if self.session is not None:
            self.session.cache.release()
        give_back_memory(self.sequences.prompts.device)

    def _report(self, rung: Rung, cause: Exception) -> None:
        steps, means = self.request.stats.memory_steps, self.ladder.means
        steps[rung.value] = steps.get(rung.value, 0) + 1
        left = {
            Rung.SHORTEN: f" to a {'tree' if means.is_tree else 'chain'} of {means.draft_tokens}",
            Rung.CHUNK: f" to {means.chunk} tokens",
        }.get(rung, "")
        logger.warning(
            "eagle31: memory ran out at %s (%s): %s%s; the text goes on unchanged",
            self.stage.value,
            _first_line(cause),
            rung.value,
            left,
        )

    def _why_not_on(self, cause: Exception) -> str:
        steps = ", ".join(f"{what} {n}x" for what, n in self.request.stats.memory_steps.items()) or "none"
        written = sum(len(new) for new in self.sequences.new)
        rows, length = self.sequences.batch_size, self.sequences.rules.max_length
        settings = MemorySettings(
            context=self.request.start.before_prompts + length,
            batch=rows,
            draft_tokens=self.shape.depth,
            tree_size=self.shape.nodes if self.shape.is_tree else None,
            prefill_chunk=self.chunk,
            cache_type=self.request.stats.cache_type,
        )
        ledger = run_ledger(self.drafter, settings)
        return (
            f"memory ran out at {self.stage.value} after {written} new tokens ({_first_line(cause)}); steps taken "
            f"before: {steps}; none that helps there is left. {ledger}Shorten the prompt or max_new_tokens (together "
            f"{length}), take fewer rows than {rows}, load the target with fewer bits, or free memory that other "
            "programs hold; `eagle31 plan` shows what fits"
        )

    # --- bringing text and caches in order -----------------------------------------------------------------------

    @property
    def _loaded(self) -> tuple[int, int]:
        """Tokens target and drafter had in their caches before the prompts' unread part."""
        start = self.request.start
        of_drafter = 0 if start.drafter is None else start.drafter.get_seq_length()
        return start.before_prompts + start.skip, of_drafter

    def _roll_back(self, target: list[int], drafter: list[int]) -> None:
        self.cache.rollback(target)
        if self.session is not None:
            self.session.rollback(drafter)

    def _return_to_common_prefix(self) -> bool:
        """Cut both caches back to what both have read of the text. False if that cannot be had any more."""
        if self.rows != self._held_rows:  # one of them may have let rows go already, or some of its layers
            self.rows = list(self._held_rows)
            return False
        of_target, of_drafter = self._loaded
        read = [length - of_target for length in self.cache.lengths]
        if self.session is not None:
            paired = [length - of_drafter for length in self.session.cache.lengths]
            read = [min(pair) for pair in zip(read, paired, strict=True)]
        # At least one token is read again: its logits are the next token's, or it renews the drafter's state.
        spare = 2 if self.session is not None and self._has_begun else 1
        lengths = [len(self.sequences.text(row, self.request.start.skip)) for row in self.rows]
        held = [min(n, length - spare) for n, length in zip(read, lengths, strict=True)]
        if min(held) < 0:
            return False
        try:
            self._roll_back([of_target + n for n in held], [of_drafter + n for n in held])
        except UnsupportedGenerationError:  # windows have slid
            return False
        return True

    @property
    def _has_begun(self) -> bool:
        return any(self.sequences.new[row] for row in self.rows)

    def _read_text(self) -> None:
        """Read what the caches do not hold of the text, then go on as after a prefill or a round."""
        self.stage = Stage.READ
        with self.clock.phase("prefill"):
            if self._is_stale:
                self._start_again()
            if not self.rows:
                return
            of_target, _ = self._loaded
            texts = [
                self.sequences.text(row, self.request.start.skip)[length - of_target :]
                for row, length in zip(self.rows, self.cache.lengths, strict=True)
            ]
            unread = 1 if self._has_begun else 0
            reading = self._read(Reading(texts, unread=unread, device=self.sequences.prompts.device))
            if unread:
                self._part_with_ended_rows()
            else:
                self._first_token(reading)

    def _read(self, reading: Reading) -> Reading:
        self.ladder.means = replace(self.ladder.means, chunk=min(self.chunk, max(reading.to_read)))
        return super()._read(reading)

    def _start_again(self) -> None:
        """Fresh caches for the rows whose caches are still needed, holding what the turn began with."""
        live, start, end = set(self.sequences.live_rows()), self.request.start, self.request.end
        needed = [row for row in self.rows if row in live or (end is not None and row not in end.rows)]
        with_drafter = self.session is not None
        del self.cache, self.session, self.verify  # the old ones go before the new ones come
        self.chunk = max(self.chunk, min(SMALLEST_CHUNK, self.request.prefill_chunk or SMALLEST_CHUNK))
        self._make_caches(self.sequences.batch_size if start.target is not None else max(len(needed), 1))
        if not with_drafter:
            self.session = None
        if self._on_host:
            self.cache.move_to(HOST)
        start.load(self.cache, self.session)
        self.rows = list(range(self.cache.batch_size)) if start.target is not None else needed
        if self.rows != needed and needed:
            self._let_go(needed)
        self.rows, self._held_rows, self._is_stale = needed, list(needed), False

    def _part_with_ended_rows(self) -> None:
        self.stage = Stage.SETTLE
        staying, end = self._staying(), self.request.end
        leaving = [b for b in range(len(self.rows)) if b not in staying]
        untaken = [b for b in leaving if end is not None and self.rows[b] not in end.rows]
        if untaken and end is not None:
            self._hand_over(untaken, end)
        if not staying:
            self.rows = []
            return
        if leaving:
            self._let_go(staying)
        self._set_roots()


def keep_for_next_turn(conversation: Conversation, sequences: Tensor, stats: SpeculationStats) -> DynamicCache | None:
    """`conversation.close`, tried twice where memory runs out: the text is written, and is not lost to its cache."""
    for _ in range(2):
        try:
            return conversation.close(sequences)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back_memory(sequences.device)
    what = Rung.FORGET.value
    stats.memory_steps[what] = stats.memory_steps.get(what, 0) + 1
    logger.warning("eagle31: memory ran out while the cache was handed back: %s, it is empty", what)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
