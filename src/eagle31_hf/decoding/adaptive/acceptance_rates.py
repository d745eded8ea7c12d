"""How likely the next draft is accepted, position by position, from counts that fade.

Texts change: a short memory follows quickly and is noisy, a long one is steady and late. Several are kept, and each has
a say by how well it foretold what was accepted lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from operator import mul

MEMORIES = (6.0, 24.0, 96.0)
"""Rounds after which a memory has forgotten about two thirds."""

POSITION_WEIGHT = 3.0
"""Observations that the rate over all positions is worth where one position is estimated."""

SCORE_MEMORY = 40.0
"""Observations over which memories are compared."""


@dataclass(frozen=True)
class Prior:
    """What is believed of a drafter before it has drafted: its chance to be right, worth so many observations.

    Few by default, so that three drafts in vain are enough to doubt it.
    """

    rate: float = 0.7
    weight: float = 2.0


class FadingRates:
    """Chance of each draft position to be accepted if all before it were, by one memory."""

    def __init__(self, memory: float, depth: int, prior: Prior):
        self.keep = exp(-1.0 / memory)
        self.prior = prior
        self.accepted = [0.0] * depth
        self.reached = [0.0] * depth

    def overall(self) -> float:
        """The rate over all positions, which those are taken to have that nobody tried lately."""
        prior = self.prior
        return (sum(self.accepted) + prior.rate * prior.weight) / (sum(self.reached) + prior.weight)

    def rates(self) -> list[float]:
        """Of each position."""
        base = self.overall() * POSITION_WEIGHT
        return [(a + base) / (r + POSITION_WEIGHT) for a, r in zip(self.accepted, self.reached, strict=True)]

    def fade(self, keep: float) -> None:
        """Let all that was seen count less."""
        self.accepted = [count * keep for count in self.accepted]
        self.reached = [count * keep for count in self.reached]


class AcceptanceRates:
    """The chance of each draft position to be accepted, mixed from several memories.

    Args:
        depth: longest draft.
        prior: what is believed at first.
    """

    def __init__(self, depth: int, prior: Prior | None = None):
        self.depth = depth
        self._memories = [FadingRates(memory, depth, prior or Prior()) for memory in MEMORIES]
        self._scores = [0.0] * len(MEMORIES)  # log-likelihood of what was seen lately
        self._by_memory: list[list[float]] | None = None
        self._reach: list[float] | None = None

    def rates(self) -> list[float]:
        """Chance of each position if all before it were accepted."""
        weights = self._weights()
        return [sum(map(mul, weights, position)) for position in zip(*self._foretold(), strict=True)]

    def _foretold(self) -> list[list[float]]:
        """The same by each memory."""
        if self._by_memory is None:
            self._by_memory = [memory.rates() for memory in self._memories]
        return self._by_memory

    def reach(self) -> list[float]:
        """Chance of each position to be accepted, all before it included."""
        if self._reach is None:
            self._reach = list(accumulate(self.rates(), mul))
        return self._reach

    def overall(self) -> float:
        """Chance of a draft token to be accepted if all before it were, over all positions."""
        return sum(map(mul, self._weights(), (memory.overall() for memory in self._memories)))

    def record(self, drafted: int, accepted: Sequence[int]) -> None:
        """One round: `drafted` tokens per row, of which each row accepted so many."""
        drafted = min(drafted, self.depth)
        if not drafted:
            return
        foretold = self._foretold()
        self._learn_anew()
        for memory in self._memories:
            memory.fade(memory.keep)
        for row in accepted:
            for position in range(min(drafted, row + 1)):
                hit = position < row
                for memory in self._memories:
                    memory.reached[position] += 1.0
                    memory.accepted[position] += hit
                self._score([rates[position] for rates in foretold], hit)

    def record_first(self, positions: int, accepted: float) -> None:
        """Of so many first draft tokens, none of which was verified in a round, this many would have been accepted."""
        self._learn_anew()
        for memory in self._memories:
            memory.reached[0] += positions
            memory.accepted[0] += accepted

    def doubt_past(self) -> None:
        """Something has changed: what was seen before counts a tenth from now on."""
        self._learn_anew()
        for memory in self._memories:
            memory.fade(0.1)
        self._scores = [0.0] * len(MEMORIES)

    def _learn_anew(self) -> None:
        """What was computed from counts no longer holds."""
        self._by_memory = self._reach = None

    def _weights(self) -> list[float]:
        best = max(self._scores)
        weights = [exp(score - best) for score in self._scores]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _score(self, foretold: Sequence[float], hit: bool) -> None:
        keep = SCORE_KEEP
        self._scores = [
            score * keep + log(rate if hit else 1.0 - rate) for score, rate in zip(self._scores, foretold, strict=True)
        ]


SCORE_KEEP = exp(-1.0 / SCORE_MEMORY)
