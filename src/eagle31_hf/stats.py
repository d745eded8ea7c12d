"""What happened while speculating: counts, acceptance and seconds. Plain numbers, no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

USELESS_LENGTH = 1.3
"""Tokens a pass below which a drafter is worth its time on no machine."""
NOT_A_NUMBER = "the drafter's scores are no numbers (NaN); the rest of the text is written without it"


@dataclass(frozen=True)
class DraftEvent:
    """Where drafting rested, went on or stopped.

    Attributes:
        new_tokens: written by then, summed over rows.
        what: `"rest"`, `"resume"`, `"stop"`.
        why: in words, with the figures it was decided by.
    """

    new_tokens: int
    what: str
    why: str


@dataclass
class Acceptance:
    """Counts of drafts, over some rounds or over some calls.

    A *round* is one verification pass of one row; the prefill pass is not a round. Position `i` (0-based) is the
    `i`-th draft token after the root on the path that was accepted. Of a draft in which a text ended only the tokens
    that were written count, the last of which is the pass's own.

    Attributes:
        rounds: verification passes, summed over rows.
        drafted: draft tokens sent to verification (tree nodes without the root), summed over rounds.
        accepted: draft tokens that were written beside each pass's own token, summed over rounds.
        drafted_at, accepted_at: per position, rounds whose draft went so deep, and those that accepted it.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, several: Iterable[Any]) -> Acceptance:
        """The sum of figures with these fields, those that are `None` left out."""
        parts = [part for part in several if part is not None]

        def total(name: str) -> list[int]:
            lists = [getattr(part, name) for part in parts]
            deepest = max(map(len, lists), default=0)
            return [sum(each[i] for each in lists if i < len(each)) for i in range(deepest)]

        rounds, drafted, accepted = (sum(getattr(p, n) for p in parts) for n in ("rounds", "drafted", "accepted"))
        return Acceptance(rounds, drafted, accepted, total("drafted_at"), total("accepted_at"))

    def count(self, *, depth: int, nodes: int, accepted: Sequence[int], written: Sequence[int] | None = None) -> None:
        """One round: `depth` deepest draft position, `nodes` draft tokens per row, `accepted` per live row.

        Args:
            written: tokens that each live row got; fewer than it accepted where its text ended. Default: one more.
        """
        missing = depth - len(self.drafted_at)
        for counts in (self.drafted_at, self.accepted_at):
            counts.extend([0] * missing)
        for count, tokens in zip(accepted, written or [count + 1 for count in accepted], strict=True):
            self.rounds += 1
            self.drafted += nodes
            self.accepted += max(tokens - 1, 0)
            for position in range(depth if tokens > count else tokens):
                self.drafted_at[position] += 1
                self.accepted_at[position] += position < count

    @property
    def by_passes(self) -> int:
        """Tokens that verification passes wrote: all of a text but its first, which follows the prefill."""
        return self.accepted + self.rounds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification pass, its own included; 0.0 before the first round."""
        return self.by_passes / self.rounds if self.rounds else 0.0

    @property
    def cumulative_acceptance(self) -> list[float]:
        """Share of the rounds that drafted position `i` in which it was accepted."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True) if d]


@dataclass(repr=False)
class SpeculationStats(Acceptance):
    """Figures of one `generate` call, drafts of every source counted together. Printed, they are three lines, or one
    where no drafts were taken.

    Attributes:
        loop: `"own"` or `"plain"`; `reason` says why it is not the first choice (empty if it is).
        cache_type: how the target's keys and values were stored: `"full"` or `"int8"`.
        passes: verification passes, all rows at once.
        looked_up: of these counts, what was drafted from the text itself (prompt lookup).
        new_tokens: tokens written, summed over rows.
        prefilled_tokens: prompt tokens our own loop read, summed over rows; not those that a carried cache held.
        arrivals: of our own loop, after the first token and after each pass: seconds since the call began, and tokens
            written since the time before, summed over rows.
        skipped_rounds: passes that drafted nothing because it would have been in vain (`drafting.planner`).
        events: every change of what is drafted, with its reason, in order.
        fallbacks: every step down that was taken, in order.
        memory_steps: what was given up because memory ran out, and how often; empty where it did not.
    """

    loop: str = "own"
    reason: str = ""
    cache_type: str = "full"
    passes: int = 0
    looked_up: Acceptance = field(default_factory=Acceptance)
    new_tokens: int = 0
    prefilled_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    skipped_rounds: int = 0
    events: list[DraftEvent] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    memory_steps: dict[str, int] = field(default_factory=dict)

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token was there; `None` where it was not noted."""
        return self.arrivals[0][0] if self.arrivals else None

    def record_round(self, *, looked_up: bool = False, **counts: Any) -> None:
        """Count one pass; arguments as of `count`."""
        self.passes += 1
        for figures in (self, self.looked_up) if looked_up else (self,):
            figures.count(**counts)

    def note_draft(self, what: str, why: str) -> None:
        """Add to `events`."""
        self.events.append(DraftEvent(self.by_passes, what, why))

    def fall_back(self, reason: str) -> None:
        """Note a step down, once."""
        if reason and reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, as JSON-ready values."""
        derived = ("first_token_s", "acceptance_length", "cumulative_acceptance")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __repr__(self) -> str:
        if self.loop == "plain" and not self.passes:
            return f"written by plain decoding, 1 token a pass: {self.reason}"
        return "\n".join((self._speed_line(), self._sources_line(), self._rests_line()))

    def _speed_line(self) -> str:
        rows, of_rows = (" and row", " of a row") if self.rounds > self.passes else ("", "")
        why = f": {self.reason}" if self.reason else ""
        cache = "" if self.cache_type == "full" else f", over {self.cache_type} keys and values"
        tokens = f"{self.new_tokens} tokens, {self.by_passes} of them in {self.rounds} passes{of_rows}"
        return f"{self.acceptance_length:.2f} tokens a pass{rows} ({tokens}{cache}){why}"

    def _sources_line(self) -> str:
        found = self.looked_up
        of_drafter = {name: _less(getattr(self, name), getattr(found, name)) for name in vars(found)}
        sources = {"drafter": Acceptance(**of_drafter), "looked up in the text": found}
        said = [f"{source}: {_accepted(counts)}" for source, counts in sources.items() if counts.drafted]
        return "; ".join(said) or "nothing was drafted"

    def _rests_line(self) -> str:
        rests = "drafting did not rest"
        if self.skipped_rounds:
            rests = f"{self.skipped_rounds} of {self.passes} passes drafted nothing: {self._why_it_rested}"
        steps = ", ".join(f"{what} {count}x" for what, count in self.memory_steps.items())
        return rests + (f"; memory ran out: {steps}" if steps else "")

    @property
    def _why_it_rested(self) -> str:
        whys = [event.why for event in self.events if event.what == "rest"]
        drafts = self.drafted > self.looked_up.drafted
        if whys:
            return whys[-1]
        return "to see how fast the target is without drafts" if drafts else "the text repeated nothing"


def _less(whole: Any, part: Any) -> Any:
    """Counts without a part of them, position by position."""
    if isinstance(whole, int):
        return whole - part
    return [count - (part[i] if i < len(part) else 0) for i, count in enumerate(whole)]


def _accepted(counts: Acceptance) -> str:
    positions = " ".join(f"{share:.2f}" for share in counts.cumulative_acceptance)
    return f"{counts.accepted} of {counts.drafted} tokens accepted (of those tried at each position {positions})"


class LastStats:
    """Figures of each thread's last call, for drafters that threads share.

    A thread that has made none sees the last call's of all: so the figures of a text that was written in the background
    and streamed here are found, too.
    """

    def __init__(self, latest: SpeculationStats | None = None):
        self._latest, self._of_thread = latest, threading.local()

    def get(self) -> SpeculationStats | None:
        return getattr(self._of_thread, "stats", self._latest)

    def set(self, stats: SpeculationStats | None) -> None:
        self._latest = self._of_thread.stats = stats

    def __reduce__(self) -> tuple:
        return LastStats, (self.get(),)


class RoundClock:
    """When tokens came, for `SpeculationStats.arrivals`, and how long the last round took, for those who plan the next.

    On a GPU, kernels run on after the host has moved on; a round lasts from one wait for the device to the next.
    """

    def __init__(self, stats: SpeculationStats):
        self._stats = stats
        self._started = time.perf_counter()
        self._noted = 0  # tokens
        self.round_s = 0.0  # of the last round, from the wait before it to its own; 0 where it made a graph
        self.graphs = 0  # there were by then
        self._round_began = self._waited = self._rest_s = 0.0

    def note_tokens(self, total: int) -> None:
        """So many tokens are written by now. Fewer than before (memory ran out) are noted once they are made up for."""
        if total > self._noted:
            self._stats.arrivals.append((time.perf_counter() - self._started, total - self._noted))
            self._noted = total

    @staticmethod
    def now() -> float:
        """Seconds, of any origin."""
        return time.perf_counter()

    def begin_round(self) -> None:
        """What lies between two rounds belongs to neither."""
        self._round_began = self.now()

    def note_wait(self, graphs: int) -> None:
        """The host has waited for the device, as it does once a round. There are so many `graphs` by now: a round that
        loads or records one takes many times as long as others, and says nothing of them."""
        self._waited, before, self.graphs = self.now(), self.graphs, graphs
        self.round_s = self._rest_s + self._waited - self._round_began if graphs == before else 0.0

    def end_round(self) -> None:
        """What was done behind the wait is seen by the next one."""
        self._rest_s = self.now() - self._waited
