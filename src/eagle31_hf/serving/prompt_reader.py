"""One prompt after the other, read in pieces in caches of its own, before its text joins a batch."""

from __future__ import annotations

import torch

from ..decoding.pair_caches import PairCaches
from ..decoding.prefill import ChunkedPrefill, PrefillState
from ..drafter.assistant import Assistant
from ..drafter.draft_state import DraftState
from ..drafter.session import DraftSession
from ..errors import UnsupportedGenerationError
from .pooled_caches import PooledCaches
from .written_text import WrittenText


class PromptReader:
    """Reads one prompt after the other, in caches of one row, all but the last token: a round begins with that.

    Args:
        drafter: attached.
        caches: of one row.
        pools: of the batch, whose rows prompts may be resumed from.
        piece: most prompt tokens of one forward.
    """

    def __init__(self, drafter: Assistant, caches: PairCaches, pools: PooledCaches, *, piece: int):
        self.binding, self.caches, self.pools, self.piece = drafter.binding, caches, pools, piece
        self.cache, self.session = caches.target, caches.drafter
        self._chunks = ChunkedPrefill(self.binding, self.cache, self.session)
        self._reading: PrefillState | None = None
        self._position = 0  # within what is read
        self._text: WrittenText | None = None

    @property
    def text(self) -> WrittenText:
        assert self._text is not None, "begin comes first"
        return self._text

    def begin(self, text: WrittenText, place: int, length: int) -> int:
        """Start behind the first `length` tokens of the row at `place`. Returns how many are left to read."""
        self.reset()
        self._text = text
        if length:
            self.pools.resume(self.caches, place, length)
        rest = list(text.request.prompt[length:])
        self._reading = PrefillState([rest], unread=1, device=self.binding.input_device)
        if len(rest) == 1 and self.session is not None:
            _start_midway(self.session)
        return len(rest) - 1

    def read(self, num_tokens: int) -> None:
        assert self._reading is not None
        end = self._position + num_tokens
        while self._position < end:
            stop = min(end, self._position + self.piece)
            self._chunks.read_columns(self._reading, self._position, stop)
            self._position = stop
        last = self._reading.last_logits[0]
        if last is not None and bool(last.isnan().any()):
            raise UnsupportedGenerationError("the model's scores of this prompt are no numbers")

    def wipe(self) -> None:
        """Forget what was read, which may be no numbers, and leave nothing of it."""
        self.caches.wipe_row(0)
        self.reset()

    def reset(self) -> None:
        """Forget what was read."""
        self.cache.reset()
        if self.session is not None:
            self.session.rollback([0])
            self.session._root = None
        self._reading, self._position, self._text = None, 0, None


def _start_midway(session: DraftSession) -> None:
    """A prompt of one token: the drafter knows nothing yet, and guesses until the first round has told it more."""
    drafter = session.drafter
    hidden = torch.zeros(1, 1, drafter.config.hidden_size, device=drafter.device, dtype=drafter.dtype)
    session._root = DraftState(drafter.draft_logits(hidden), hidden)
