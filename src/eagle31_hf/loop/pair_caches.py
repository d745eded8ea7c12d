"""The caches of target and drafter, which hold prefixes of the same text and move together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from ..cache import graph_sizes
from ..cache.kept_buffers import KeptBuffers
from ..cache.row_pool import RowPool, resume_row, wipe_row
from ..cache.speculative import SpeculativeCache
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.session import SLAB, DraftSession, DraftState, positions_read_at_once
from ..drafting.shape import DraftShape

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on


@dataclass
class PairCaches:
    """What target and drafter have read of the text.

    Attributes:
        target: keys and values of the target, up to the last token or the one before it.
        drafter: the drafter's session, whose cache is one token behind; `None` without one, or once it was dropped.
        lender: of the memory they write in, while it is lent to them.
    """

    target: SpeculativeCache
    drafter: DraftSession | None
    lender: KeptBuffers | None = None
    target_kind: ClassVar[type[SpeculativeCache]] = SpeculativeCache
    session_kind: ClassVar[type[DraftSession]] = DraftSession

    @classmethod
    def make(
        cls,
        drafter: Assistant,
        shape: DraftShape,
        *,
        batch_size: int,
        length: int,
        chunk: int,
        for_graphs: bool = False,
        exact_sizes: bool = False,
        cache_type: str = "full",
        device: torch.device | None = None,
    ) -> Self:
        """Empty caches, which own no memory until something is written.

        Args:
            drafter: attached.
            shape: the largest draft of a round.
            length: longest text of a row.
            chunk: prompt tokens per forward.
            for_graphs: of sizes that compiled steps can write in, too. Eager steps can write in either.
            exact_sizes: as in `graph_sizes.cache_size`.
            cache_type: as in `SpeculativeCache`; the target's.
            device: where token ids live; default: where the target takes them.
        """
        binding = drafter.binding
        sizes = partial(graph_sizes.cache_size, exact=exact_sizes) if for_graphs else eager_size
        target = sizes(*shape.target_cache(length, chunk))
        cache = cls.target_kind.from_config(
            binding.text_config,
            batch_size=batch_size,
            **target._asdict(),
            masks_by_type=binding.masks_by_type,
            cache_type=cache_type,
            device=device or binding.input_device,
        )
        if not isinstance(drafter, Eagle31Drafter):
            return cls(cache, None)
        read_at_once = positions_read_at_once(drafter, chunk)
        own = sizes(*shape.drafter_cache(length, read_at_once))
        return cls(cache, cls.session_kind(drafter, batch_size=batch_size, **own._asdict()))

    def write_in(self, kept: KeptBuffers) -> None:
        """Store keys and values in memory that outlives these caches, unless another text is writing there."""
        if kept.lend(self):
            self.lender = kept
            self.target.write_in(kept, "target")
            if self.drafter is not None:
                self.drafter.cache.write_in(kept, "drafter")

    def give_back(self) -> None:
        """Let the next text have the memory these were lent, which will be overwritten."""
        if self.lender is not None:
            self.lender.give_back(self)
            self.lender = None

    @property
    def _both(self) -> list[SpeculativeCache]:
        return [self.target] if self.drafter is None else [self.target, self.drafter.cache]

    @property
    def num_bytes(self) -> int:
        """Allocated for keys, values and states."""
        return sum(cache.num_bytes for cache in self._both)

    @property
    def batch_size(self) -> int:
        return self.target.batch_size

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.target.select_rows(rows)
        if self.drafter is not None:
            self.drafter.select_rows(rows)

    def reset(self) -> None:
        """Empty every row."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()

    def catch_up(self) -> None:
        """Let the drafter read what it has put off."""
        if self.drafter is not None:
            self.drafter.catch_up()

    def wipe_row(self, row: int) -> None:
        """Leave nothing of a row, which may hold what is no number."""
        for cache in self._both:
            wipe_row(cache, row)

    def release(self) -> None:
        """Give back what can be made again."""
        for cache in self._both:
            cache.release()


def eager_size(capacity: int, block: int) -> graph_sizes.CacheSize:
    """A cache for eager steps: long ones grow in slabs."""
    return graph_sizes.CacheSize(capacity, block, SLAB if capacity > SLAB else None)


# --- caches whose rows come and go ------------------------------------------------------------------------------------


class PooledDraftSession(DraftSession):
    """The drafter's side."""

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
        self.reset()
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

    def can_resume(self, place: int, length: int, paired: int) -> bool:
        """As `RowPool.can_resume`, on both sides."""
        of_drafter = self.drafter is None or self.drafter.cache.can_resume(place, paired)
        return of_drafter and self.target.can_resume(place, length)

    def resume(self, other: PairCaches, place: int, length: int, paired: int) -> None:
        """Begin others, of one row, with the first `length` tokens of a row here, live or parked; the drafter with the
        first `paired` of them."""
        resume_row(other.target, self.target, place, length)
        if self.drafter is not None and other.drafter is not None:
            resume_row(other.drafter.cache, self.drafter.cache, place, paired)
            other.drafter._rotary = None
