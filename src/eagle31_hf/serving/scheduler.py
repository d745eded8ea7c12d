"""Who reads and who writes next: a bounded queue, rows to give away, prompts read in pieces between rounds. No torch.

    submit ──► waiting ──► reading (one at a time, at most `read_budget` tokens between two rounds) ──► writing ──► gone

First come, first served. A round is a pass of all that write; nobody's stream waits longer than a round and one budget
of reading. Several short prompts are read between two rounds, so that rows do not stand empty; each of them takes a
share of the budget even if there is little to read, since a forward is not free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        to_read: tokens of its prompt that are to be read yet; `None` before reading begins.
        cancelled: its client has gone.
    """

    request: Request
    on_event: OnEvent
    text: Row | None = None
    to_read: int | None = None
    cancelled: bool = False


@dataclass
class Scheduler:
    """Queue, rows and turns. `submit` may be called from any thread, all else by the one that works.

    Attributes:
        max_rows: texts written at once.
        max_waiting: requests that may wait beyond those a row is free for.
        read_budget: prompt tokens read between two rounds while others write.
    """

    max_rows: int
    max_waiting: int
    read_budget: int
    waiting: list[Ticket] = field(default_factory=list)
    reading: Ticket | None = None
    writing: list[Ticket] = field(default_factory=list)

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        waiting = len(self.waiting) - self.free_rows
        if waiting >= self.max_waiting:
            raise QueueFullError(f"{waiting} requests are waiting already, which is all that may; try again later")
        ticket = Ticket(request, on_event)
        self.waiting.append(ticket)
        return ticket

    def turn(self, engine: Any) -> None:
        """Have the `Engine` read prompts as far as the budget goes, or whole where nothing is written yet; then a round
        of all that write."""
        left = self.read_budget
        while (left > 0 or not self.writing) and (ticket := self._next_to_read(engine)) is not None:
            try:
                left -= self._read(ticket, left, engine)
            except Exception as error:  # whatever a template, a grammar or a forward raises
                engine.reading_failed(ticket, error)
        if self.writing:
            engine.round()

    def _next_to_read(self, engine: Any) -> Ticket | None:
        for ticket in self.tickets:
            if ticket.cancelled and ticket not in self.writing:
                engine.drop(ticket)
        if self.reading is None and self.waiting and len(self.writing) < self.max_rows:
            self.reading = self.waiting.pop(0)
        return self.reading

    def _read(self, ticket: Ticket, left: int, engine: Any) -> int:
        """Read on, at most `left` tokens if others write. Returns what it takes of the budget."""
        taken = 0
        if ticket.to_read is None:
            ticket.to_read = engine.begin(ticket)
            taken = max(0, self.read_budget // PROMPTS_IN_A_BUDGET - ticket.to_read)
        num_tokens = min(ticket.to_read, max(0, left - taken)) if self.writing else ticket.to_read
        if num_tokens:
            engine.read(ticket, num_tokens)
            ticket.to_read -= num_tokens
        is_alone = not self.writing
        if ticket.to_read == 0:
            engine.join(ticket)
            if ticket is self.reading:
                self.reading = None
                self.writing.append(ticket)
        return 0 if is_alone else taken + num_tokens

    def leave(self, ticket: Ticket) -> None:
        """Its text has ended, or failed."""
        if ticket is self.reading:
            self.reading = None
        for tickets in (self.waiting, self.writing):
            if ticket in tickets:
                tickets.remove(ticket)

    @property
    def tickets(self) -> list[Ticket]:
        """All that have not left."""
        return [*self.waiting, *([self.reading] if self.reading else []), *self.writing]

    @property
    def free_rows(self) -> int:
        """Rows that nobody writes in, nor will once a prompt has been read."""
        return self.max_rows - len(self.writing) - (self.reading is not None)
