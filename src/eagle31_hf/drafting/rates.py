"""How likely the next draft is accepted, from counts that fade: texts change.

Of the drafter's drafts position by position; of what is looked up in the text by how many tokens matched before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp
from operator import mul

KEEP = exp(-1.0 / 16.0)
"""What is left of a count after a round: after 16 of them about a third."""

FIRST_RATE, FIRST_WEIGHT = 0.7, 2.0
"""What is believed of a drafter before it has drafted, worth so many observations: three drafts in vain are enough to
doubt it."""

SHORTEST_MATCH, LONGEST_MATCH = 2, 8
"""Last tokens that must have been written before for a lookup, at least, and as many as are compared."""


class DraftRates:
    """Of the drafter's drafts.

    Args:
        depth: longest draft.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self._accepted, self._reached = [0.0] * depth, [0.0] * depth
        self._reach: list[float] | None = None

    @property
    def overall(self) -> float:
        """The rate over all positions, which those are taken to have that were not tried lately."""
        weighted = sum(self._accepted) + FIRST_RATE * FIRST_WEIGHT
        return weighted / (sum(self._reached) + FIRST_WEIGHT)

    def reach(self) -> list[float]:
        """Chance of each position to be accepted, all before it included."""
        if self._reach is None:
            base = self.overall * FIRST_WEIGHT
            each = zip(self._accepted, self._reached, strict=True)
            self._reach = list(accumulate(((a + base) / (r + FIRST_WEIGHT) for a, r in each), mul))
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


class LookupRates:
    """Of tokens that followed an earlier place like the present one, by the length of the match.

    Before anything is known the shortest match is taken to be right every other time, and a longer one the more often:
    as if it had been right once for each of its tokens, and wrong as often as the shortest one.
    """

    def __init__(self) -> None:
        self._right = [0.0] * (LONGEST_MATCH + 1)
        self._tried = [0.0] * (LONGEST_MATCH + 1)

    def reach(self, match: int, length: int) -> list[float]:
        """Chance of each of `length` tokens to be accepted: every right one makes the match longer."""
        return list(accumulate((self._rate(match + index) for index in range(length)), mul))

    def record(self, match: int, looked_up: Sequence[int], written: Sequence[int]) -> None:
        """Compare a lookup, drafted or not, with what was written."""
        for index, (guess, token) in enumerate(zip(looked_up, written, strict=False)):
            known = min(match + index, LONGEST_MATCH)
            self._right[known] = self._right[known] * KEEP + (guess == token)
            self._tried[known] = self._tried[known] * KEEP + 1.0
            if guess != token:
                return

    def _rate(self, match: int) -> float:
        known = min(match, LONGEST_MATCH)
        return (self._right[known] + known) / (self._tried[known] + known + SHORTEST_MATCH)
