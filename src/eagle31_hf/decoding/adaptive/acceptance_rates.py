"""How likely the next draft is accepted, position by position, from counts that fade: texts change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from operator import mul

MEMORY = 16.0
"""Rounds after which about two thirds of what was seen is forgotten."""

KEEP = exp(-1.0 / MEMORY)


@dataclass(frozen=True)
class Prior:
    """What is believed of a drafter before it has drafted: its chance to be right, worth so many observations.

    Few by default, so that three drafts in vain are enough to doubt it.
    """

    rate: float = 0.7
    weight: float = 2.0


class AcceptanceRates:
    """Chance of each draft position to be accepted if all before it were.

    Args:
        depth: longest draft.
        prior: what is believed at first.
    """

    def __init__(self, depth: int, prior: Prior | None = None):
        self.depth, self._prior = depth, prior or Prior()
        self._accepted = [0.0] * depth
        self._reached = [0.0] * depth
        self._reach: list[float] | None = None

    def overall(self) -> float:
        """The rate over all positions, which those are taken to have that nobody tried lately."""
        prior = self._prior
        return (sum(self._accepted) + prior.rate * prior.weight) / (sum(self._reached) + prior.weight)

    def rates(self) -> list[float]:
        """Of each position."""
        weight = Prior.weight  # the usual one: what earlier texts weigh says nothing of one position
        base = self.overall() * weight
        return [(a + base) / (r + weight) for a, r in zip(self._accepted, self._reached, strict=True)]

    def reach(self) -> list[float]:
        """Chance of each position to be accepted, all before it included."""
        if self._reach is None:
            self._reach = list(accumulate(self.rates(), mul))
        return self._reach

    def record(self, drafted: int, accepted: Sequence[int]) -> None:
        """One round: `drafted` tokens per row, of which each row accepted so many."""
        drafted = min(drafted, self.depth)
        if not drafted:
            return
        self._accepted = [count * KEEP for count in self._accepted]
        self._reached = [count * KEEP for count in self._reached]
        self._reach = None
        for row in accepted:
            for position in range(min(drafted, row + 1)):
                self._reached[position] += 1.0
                self._accepted[position] += position < row

    def begin_anew(self, positions: int, accepted: float) -> None:
        """What was seen before counts no more; of so many first draft tokens this many would have been accepted."""
        self._reached = [float(positions)] + [0.0] * (self.depth - 1)
        self._accepted = [accepted] + [0.0] * (self.depth - 1)
        self._reach = None
