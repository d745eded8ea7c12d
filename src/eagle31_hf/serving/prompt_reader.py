"""One prompt after the other, read in pieces in caches of its own, before its text joins a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.row_pool import resume_row, wipe_row
from ..cache.speculative import SpeculativeCache
from ..decoding.prefill import ChunkedPrefill, PrefillState
from ..drafter.session import DraftSession, DraftState
from ..errors import UnsupportedGenerationError
from .written_text import WrittenText

if TYPE_CHECKING:
    from .batch import TextBatch


class PromptReader:
    """Reads one prompt after the other, in caches of one row, all but the last token: a round begins with that."""

    def __init__(self, batch: TextBatch, sizes: dict[str, int]):
        self.batch = batch
        self.cache: SpeculativeCache = batch.target_cache(SpeculativeCache, 1, sizes)
        self.session = DraftSession(batch.drafter, batch_size=1, **sizes)
        self._chunks = ChunkedPrefill(batch.binding, self.cache, self.session)
        self._reading: PrefillState | None = None
        self._start = self._position = 0  # of what is read, in the prompt; within what is read
        self._text: WrittenText | None = None

    @property
    def text(self) -> WrittenText:
        assert self._text is not None, "begin comes first"
        return self._text

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes + self.session.cache.num_bytes

    def begin(self, text: WrittenText, place: int, length: int) -> int:
        """Start behind the first `length` tokens of the row at `place`. Returns how many are left to read."""
        self.reset()
        self._text, self._start = text, length
        if length:
            resume_row(self.cache, self.batch.cache, place, length)
            resume_row(self.session.cache, self.batch.session.cache, place, length)
            self.session._rotary = None
        rest = list(text.request.prompt[length:])
        self._reading = PrefillState([rest], unread=1, device=self.batch.binding.input_device)
        if len(rest) == 1:
            self._start_midway()
        return len(rest) - 1

    def read(self, num_tokens: int) -> None:
        assert self._reading is not None
        end = self._position + num_tokens
        while self._position < end:
            stop = min(end, self._position + self.batch.prefill_chunk)
            self._chunks.read_columns(self._reading, self._position, stop)
            self._note_piece(self._start + self._position, stop - self._position)
            self._position = stop
        last = self._reading.last_logits[0]
        if last is not None and bool(last.isnan().any()):
            raise UnsupportedGenerationError("the model's scores of this prompt are no numbers")

    def _note_piece(self, start: int, length: int) -> None:
        """So many tokens from `start` on were read together."""
        if start == self.text.even_tokens and length == self.batch.prefill_chunk:
            self.text.even_tokens += length

    def wipe(self) -> None:
        """Forget what was read, which may be no numbers, and leave nothing of it."""
        wipe_row(self.cache, 0)
        wipe_row(self.session.cache, 0)
        self.reset()

    def reset(self) -> None:
        """Forget what was read."""
        self.cache.reset()
        self.session.rollback([0])
        self.session._root = None
        self._reading, self._position, self._text = None, 0, None

    def _start_midway(self) -> None:
        """A prompt of one token: the drafter knows nothing yet, and guesses until the first round has told it more."""
        drafter = self.batch.drafter
        hidden = torch.zeros(1, 1, drafter.config.hidden_size, device=drafter.device, dtype=drafter.dtype)
        self.session._root = DraftState(drafter.draft_logits(hidden), hidden)
