"""Both sides of a batch whose rows come and go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cache.row_pool import RowPool, resume_row
from ..decoding.pair_caches import PairCaches
from ..drafter.draft_state import DraftState
from ..drafter.session import DraftSession


class PooledDraftSession(DraftSession):
    """The drafter's side of a batch whose rows come and go."""

    cache: RowPool
    cache_kind = RowPool

    def join(self, other: DraftSession) -> None:
        """Take the only row of another session behind the others; where memory runs out, nothing has changed."""
        self.catch_up()
        own, new = self._root, other.root
        joined = new if own is None else DraftState(
            torch.cat((own.logits, new.logits)), torch.cat((own.feedback, new.feedback))
        )  # fmt: skip
        self.cache.join(other.cache)
        self._root, self._rotary = joined, None

    def leave(self, place: int) -> None:
        """Let a row go; the last one takes its place."""
        self.catch_up()
        rows = list(range(self.cache.batch_size))
        self.cache.leave(place)
        rows[place] = rows[-1]
        self._take_root(rows[:-1])

    def empty(self) -> None:
        """Forget all rows."""
        self.rollback(self.cache.lengths)  # and what was put off
        self.cache.empty()
        self._root = None


@dataclass
class PooledCaches(PairCaches):
    """Pools of rows for target and drafter, of which none is live yet."""

    target: RowPool
    drafter: PooledDraftSession | None
    target_kind = RowPool
    session_kind = PooledDraftSession

    def join(self, other: PairCaches) -> int:
        """Take the only row of others behind the live ones, on both sides or on neither. Returns its place."""
        place = self.target.join(other.target)
        try:
            if self.drafter is not None and other.drafter is not None:
                self.drafter.join(other.drafter)
        except BaseException:
            self.target.leave(place)
            raise
        return place

    def leave(self, place: int) -> int:
        """Park a live row behind the others; the last one takes its place. Returns where the parked row lies."""
        parked = self.target.leave(place)
        if self.drafter is not None:
            self.drafter.leave(place)
        return parked

    def empty(self) -> None:
        """Forget all rows, whatever state a failure has left them in."""
        self.target.empty()
        if self.drafter is not None:
            self.drafter.empty()

    def can_resume(self, place: int, length: int) -> bool:
        """As `RowPool.can_resume`, on both sides."""
        of_drafter = self.drafter is None or self.drafter.cache.can_resume(place, length)
        return of_drafter and self.target.can_resume(place, length)

    def resume(self, other: PairCaches, place: int, length: int) -> None:
        """Begin others, of one row, with the first `length` tokens of a row here, live or parked."""
        resume_row(other.target, self.target, place, length)
        if self.drafter is not None and other.drafter is not None:
            resume_row(other.drafter.cache, self.drafter.cache, place, length)
            other.drafter._rotary = None
