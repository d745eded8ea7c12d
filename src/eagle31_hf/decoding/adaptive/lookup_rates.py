"""How often what the text said before comes again, by how long a run of tokens already does.

A lookup costs nothing to make, so it is judged in every round, verified or not, against the tokens that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp
from operator import mul

MATCH_CLASSES = (2, 3, 4, 6, 8)
"""Shortest match of each class: matches of one class are taken to be equally telling."""

PRIOR_RATES = (0.35, 0.5, 0.65, 0.75, 0.85)
PRIOR_RATES_DRAWN = (0.3, 0.35, 0.55, 0.65, 0.75)
"""Of texts drawn at temperature 1, which repeat themselves less: two pairs' rates on four kinds of text."""

PRIOR_WEIGHT = 4.0
KEEP = exp(-1.0 / 64.0)


class LookupRates:
    """Chance of each looked-up token to be right, by the length of the match it was found by.

    Args:
        sampled: whether the text is drawn.
    """

    def __init__(self, *, sampled: bool = False) -> None:
        self._prior = PRIOR_RATES_DRAWN if sampled else PRIOR_RATES
        self._right = [0.0] * len(MATCH_CLASSES)
        self._tried = [0.0] * len(MATCH_CLASSES)

    def reach(self, match: int, length: int) -> list[float]:
        """Chance of each of `length` tokens to be accepted: every right one makes the match longer."""
        return list(accumulate((self._rate(match + index) for index in range(length)), mul))

    def record(self, match: int, looked_up: Sequence[int], written: Sequence[int]) -> None:
        """Compare a lookup with what was written instead of it, or with its help."""
        for index, (guess, token) in enumerate(zip(looked_up, written, strict=False)):
            which = match_class(match + index)
            self._right[which] = self._right[which] * KEEP + (guess == token)
            self._tried[which] = self._tried[which] * KEEP + 1.0
            if guess != token:
                return

    def _rate(self, match: int) -> float:
        which = match_class(match)
        return (self._right[which] + self._prior[which] * PRIOR_WEIGHT) / (self._tried[which] + PRIOR_WEIGHT)


def match_class(match: int) -> int:
    """Index of the class a match of at least the shortest length belongs to."""
    return max(index for index, shortest in enumerate(MATCH_CLASSES) if match >= shortest or index == 0)
