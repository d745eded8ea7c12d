"""Who reads and who writes next: a bounded queue, prompts read in pieces between rounds, and what texts are told.

    submit ──► waiting ──► reading (one at a time, a chunk of tokens between two rounds) ──► writing ──► gone

First come, first served. A round is a pass of all that write; nobody's stream waits longer than a round and one budget
of reading. Several short prompts are read between two rounds, so that rows do not stand empty; each of them takes a
share of the budget even if there is little to read, since a forward is not free. No torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..errors import Eagle31Error, count
from .api_errors import ApiError
from .text import Event

if TYPE_CHECKING:
    from .batch import Batch
    from .rows import ServedText

RETRY_AFTER_S = "5"
PROMPTS_IN_A_BUDGET = 4
"""Most prompts begun between two rounds."""

logger = logging.getLogger(__name__)


class Scheduler:
    """The queue of a batch, and its turns. `submit` may be called from any thread, all else by the one that works.

    Args:
        batch: reads and writes, and says how many may wait beyond those a row is free for.

    Attributes:
        requests, totals: texts that have ended, by how, and sums of their `Usage`.
    """

    def __init__(self, batch: Batch):
        self.batch, self.settings = batch, batch.settings
        self.waiting: list[ServedText] = []
        self.requests, self.totals = Counter[str](), Counter[str]()

    def submit(self, text: ServedText) -> None:
        """Line it up."""
        waiting = len(self.waiting) + self.running - self.settings.max_rows
        if waiting >= self.settings.max_waiting:
            message = f"{count(waiting, 'text')} waiting already, as many as may; try again later"
            raise ApiError(message, status=429, code="queue_full", headers={"Retry-After": RETRY_AFTER_S})
        self.waiting.append(text)

    @property
    def running(self) -> int:
        """Texts that are read or written."""
        return len(self.batch.texts) + (self.batch.reading is not None)

    @property
    def texts(self) -> list[ServedText]:
        """All that have not ended."""
        reading = self.batch.reading
        return [*self.waiting, *([reading] if reading else []), *self.batch.texts]

    def turn(self) -> None:
        """Read prompts as far as the budget goes, or whole where nothing is written yet; then a round of all that
        write. What fails ends the text that is read, or those of the round."""
        try:
            for gone in [text for text in self.texts if text.cancelled]:
                self._let_go(gone, Event(finish="cancelled"))
        except Exception as error:  # a drafter that rests reads on before a row leaves
            self._fail_all(list(self.batch.texts), error)
        left = self.settings.prefill_chunk
        while (left > 0 or not self.batch.texts) and (text := self._next_to_read()) is not None:
            try:
                left -= self._read(text, left)
            except Exception as error:  # whatever a template, a grammar or a forward raises
                length, is_ours = len(text.request.prompt), isinstance(error, Eagle31Error)
                logger.error("eagle31: a prompt of %d tokens was not read: %s", length, error, exc_info=not is_ours)
                self._let_go(text, Event.failure(error))
        if self.batch.texts:
            self._round()

    def _next_to_read(self) -> ServedText | None:
        has_row = len(self.batch.texts) < self.settings.max_rows
        return self.batch.reading or (self.waiting[0] if self.waiting and has_row else None)

    def _read(self, text: ServedText, left: int) -> int:
        """Read on, at most `left` tokens if others write. Returns what it takes of the budget."""
        batch, taken, is_alone = self.batch, 0, not self.batch.texts
        if batch.reading is not text:
            self.waiting.remove(text)
            batch.begin(text)
            taken = max(0, self.settings.prefill_chunk // PROMPTS_IN_A_BUDGET - batch.to_read) if batch.to_read else 0
        num_tokens = batch.to_read if is_alone else min(batch.to_read, max(0, left - taken))
        if num_tokens:
            batch.read(num_tokens)
        if not batch.to_read:
            self._join(text)
        return 0 if is_alone else taken + num_tokens

    def _join(self, text: ServedText) -> None:
        """The prompt has been read: its text begins."""
        if text.request.prompt_logprobs is not None:
            self._tell(text, Event(prompt_logprobs=tuple(text.prompt_logprobs)))
        if text.request.max_new_tokens:
            self._tell(text, self.batch.join())
        else:
            self._let_go(text, Event(finish="length"))

    def _let_go(self, text: ServedText, event: Event) -> None:
        """End a text wherever it is; after an error nothing that it leaves behind is trusted."""
        if text in self.waiting:
            self.waiting.remove(text)
        if text is self.batch.reading:
            self.batch.drop_reading()
        if text in self.batch.texts:
            self.batch.leave(text, trusted=not event.error)
        self._tell(text, event)

    def _round(self) -> None:
        """A pass of all that write."""
        texts = list(self.batch.texts)
        try:
            brought = self.batch.round()
        except Exception as error:
            self._fail_all(texts, error)
            return
        for text, event in brought:
            self._tell(text, event)

    def _fail_all(self, texts: list[ServedText], error: Exception) -> None:
        """End all that write; nothing that they have left behind is trusted."""
        logger.error("eagle31: a round of %d texts failed", len(texts), exc_info=error)
        self.batch.reset()
        for text in texts:
            self._tell(text, Event.failure(error))

    def stop(self, why: str) -> None:
        """End all texts; the last that is asked for."""
        for text in self.texts:
            self._tell(text, Event(finish="shutdown", error=why))

    def _tell(self, text: ServedText, event: Event) -> None:
        if event.finish is not None:
            self.requests[event.finish] += 1
            self.totals.update(asdict(text.usage))
        try:
            text.on_event(event)
        except Exception:  # of a listener, which is no other text's
            logger.exception("eagle31: a listener failed")
