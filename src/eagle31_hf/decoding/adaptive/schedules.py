"""How many tokens to draft: `num_assistant_tokens_schedule`, each schedule a class.

All are asked the same: the length of the next draft, given the chance of each position to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .costs import RoundTable, choose_length

GAIN = 0.15
"""Of the PID controller's integral, and of its measured value's smoothing; its two other gains are 1."""


class LengthSchedule(Protocol):
    """Decides draft lengths."""

    def length(self, reach: Sequence[float]) -> int:
        """Of the next draft, at least 1. `reach` is the chance of each position, all before it included."""
        ...

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        """Learn what became of a draft: `drafted` tokens per row, `accepted` of them by each."""
        ...


class ConstantSchedule:
    """Always the same length."""

    def __init__(self, length: int):
        self._length = length

    def length(self, reach: Sequence[float]) -> int:
        return self._length

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        pass


class HeuristicSchedule:
    """Two tokens more after a draft that was accepted whole, one less after any other, as transformers does it."""

    def __init__(self, length: int, longest: int, shortest: int = 1):
        self._length, self._longest, self._shortest = length, longest, shortest

    def length(self, reach: Sequence[float]) -> int:
        return self._length

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        if drafted:
            change = 2 if min(accepted) >= drafted else -1
            self._length = min(max(self._length + change, self._shortest), self._longest)


class CalibratedSchedule:
    """The length that is expected to write fastest on this machine.

    Args:
        table: what rounds take here.
        lengths: candidates; few of them where each is a graph of its own.
    """

    def __init__(self, table: RoundTable, lengths: Sequence[int]):
        self._table, self._lengths = table, sorted(lengths)

    def length(self, reach: Sequence[float]) -> int:
        return choose_length(self._table, reach, self._lengths).depth

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        pass


class PidSchedule:
    """Steers the length until its last token is accepted just as often as pays: a PID controller.

    The measured value is how often a draft is accepted whole, smoothed; the set point is the chance from which on one
    more token pays at the present speed (`marginal_break_even`). The integral stops where the length is at a bound
    (anti-windup), and the derivative looks at the measured value alone, so that a new set point makes no jump.

    Args:
        table: what rounds take here.
        start: first length.
        longest, shortest: bounds.
    """

    def __init__(self, table: RoundTable, start: int, longest: int, shortest: int = 1):
        self._table, self._longest, self._shortest = table, longest, shortest
        self._integral = float(start)
        self._value = float(start)  # the length before rounding
        self._whole: float | None = None  # how often drafts are accepted whole

    def length(self, reach: Sequence[float]) -> int:
        return min(max(round(self._value), self._shortest), self._longest)

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        if not drafted:
            return
        length = self.length(reach)
        if drafted < length and min(accepted) >= drafted:
            return  # cut short by the text's end, and right as far as it went: says nothing of the length
        set_point = self._set_point(length, reach)
        now = sum(row >= length for row in accepted) / len(accepted)
        before = set_point if self._whole is None else self._whole
        self._whole = before + GAIN * (now - before)
        # A share of the way to the end of the scale: set points near 0 or 1 steer as quickly in both directions.
        error = (self._whole - set_point) / (1.0 - set_point if self._whole > set_point else set_point)
        self._integral = self._bounded(self._integral + GAIN * error)
        self._value = self._bounded(self._integral + error - (self._whole - before))

    def _bounded(self, length: float) -> float:
        return min(max(length, float(self._shortest)), float(self._longest))

    def _set_point(self, length: int, reach: Sequence[float]) -> float:
        here = choose_length(self._table, reach, (length,))
        last = min(max(length, 2), self._longest)  # the first one's cost is that of drafting at all: the guard's matter
        return min(max(self._table.marginal_break_even(last, max(here.speedup, 1.0)), 0.02), 0.98)


class FewLengths:
    """Another schedule's lengths, each cut to the longest of a few that it reaches: every length may be a graph.

    Args:
        inner: steers.
        lengths: that may be drafted, at least one.
    """

    def __init__(self, inner: LengthSchedule, lengths: Sequence[int]):
        self._inner, self._lengths = inner, sorted(lengths)

    def length(self, reach: Sequence[float]) -> int:
        wanted = self._inner.length(reach)
        return max((length for length in self._lengths if length <= wanted), default=self._lengths[0])

    def record(self, drafted: int, accepted: Sequence[int], reach: Sequence[float]) -> None:
        wanted = self._inner.length(reach)
        if drafted >= self.length(reach) and wanted > drafted:  # whole drafts are what the inner one meant by whole
            accepted, drafted = [wanted if row >= drafted else row for row in accepted], wanted
        self._inner.record(drafted, accepted, reach)
