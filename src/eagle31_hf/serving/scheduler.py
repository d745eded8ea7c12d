"""Who reads and who writes next: a bounded queue, rows to give away, prompts read in pieces between rounds. No torch.

    submit ──► waiting ──► reading (one at a time, at most `read_budget` tokens between two rounds) ──► writing ──► gone

First come, first served. A round is a pass of all that write; nobody's stream waits longer than a round and one budget
of reading. Several short prompts are read between two rounds, so that rows do not stand empty; each of them takes a
share of the budget even if there is little to read, since a forward is not free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import Eagle31Error
from .text import OnEvent, Request

if TYPE_CHECKING:
    from .rows import Row

PROMPTS_IN_A_BUDGET = 4
"""Most prompts begun between two rounds."""


class QueueFullError(Eagle31Error):
    """As many requests wait as may; try again later."""


@dataclass(eq=False)
class Ticket:
    """One request on its way.

    Attributes:
        text: what is written, once its prompt is being read.
        to_read: tokens of its prompt that are to be read yet; known once reading begins.
        cancelled: its client has gone.
    """

    request: Request
    on_event: OnEvent
    text: Row | None = None
    to_read: int = 0
    cancelled: bool = False


@dataclass(frozen=True)
class Step:
    """What to do next, in this order."""

    dropped: tuple[Ticket, ...] = ()  # cancelled before they wrote anything
    begin: Ticket | None = None  # starts reading now
    read: int = 0  # so many tokens of the one that reads
    round: bool = False  # all that write take a round

    @property
    def is_idle(self) -> bool:
        return not (self.dropped or self.begin or self.read or self.round)


@dataclass
class Scheduler:
    """Queue, rows and turns."""

    max_rows: int  # texts written at once
    max_waiting: int  # requests that may wait beyond those a row is free for; `submit` refuses any more
    read_budget: int  # prompt tokens read between two rounds while others write
    waiting: deque[Ticket] = field(default_factory=deque)
    reading: Ticket | None = None
    writing: list[Ticket] = field(default_factory=list)
    _spent: int = 0  # of the budget, since the last round

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        waiting = len(self.waiting) - self.free_rows
        if waiting >= self.max_waiting:
            raise QueueFullError(f"{waiting} requests are waiting already, which is all that may; try again later")
        ticket = Ticket(request, on_event)
        self.waiting.append(ticket)
        return ticket

    def next_step(self) -> Step:
        """Decide. Tickets change hands here and in `begun`, `has_read` and `leave`, nowhere else."""
        dropped = tuple(self._drop_cancelled())
        left = self.read_budget - self._spent
        if self.writing and left <= 0:
            return self._round(dropped)
        if self.reading is not None:
            read = self.reading.to_read
            if self.writing:
                read = min(read, left)
                self._spent += read
            return Step(dropped, read=read)
        if self.waiting and len(self.writing) < self.max_rows:
            self.reading = self.waiting.popleft()
            return Step(dropped, begin=self.reading)
        return self._round(dropped)

    def _round(self, dropped: tuple[Ticket, ...]) -> Step:
        self._spent = 0
        return Step(dropped, round=bool(self.writing))

    def begun(self, to_read: int) -> None:
        """The one that reads has so many tokens ahead of it."""
        assert self.reading is not None
        self.reading.to_read = to_read
        if self.writing:  # what reading itself does not take of a prompt's share
            self._spent += max(0, self.read_budget // PROMPTS_IN_A_BUDGET - to_read)

    def has_read(self, tokens: int) -> bool:
        """So many tokens were read. Returns whether the prompt is done; its text is then being written."""
        assert self.reading is not None
        self.reading.to_read -= tokens
        if self.reading.to_read > 0:
            return False
        self.writing.append(self.reading)
        self.reading = None
        return True

    def leave(self, ticket: Ticket) -> None:
        """Its text has ended, or failed."""
        if ticket is self.reading:
            self.reading = None
        elif ticket in self.writing:
            self.writing.remove(ticket)
        elif ticket in self.waiting:
            self.waiting.remove(ticket)

    def _drop_cancelled(self) -> Iterator[Ticket]:
        for ticket in [*self.waiting]:
            if ticket.cancelled:
                self.waiting.remove(ticket)
                yield ticket
        if self.reading is not None and self.reading.cancelled:
            yield self.reading
            self.reading = None

    @property
    def tickets(self) -> list[Ticket]:
        """All that have not left."""
        return [*self.waiting, *([self.reading] if self.reading else []), *self.writing]

    @property
    def free_rows(self) -> int:
        """Rows that nobody writes in, nor will once a prompt has been read."""
        return self.max_rows - len(self.writing) - (self.reading is not None)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.reading or self.writing)
