"""How often what the text said before comes again, by how long a run of tokens already does.

A lookup costs nothing to make, so it is judged in every round, verified or not, against the tokens that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .acceptance_rates import KEEP
from .prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH


class LookupRates:
    """Chance of each looked-up token to be right, by the length of the match it was found by.

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
        """Compare a lookup with what was written instead of it, or with its help."""
        for index, (guess, token) in enumerate(zip(looked_up, written, strict=False)):
            known = min(match + index, LONGEST_MATCH)
            self._right[known] = self._right[known] * KEEP + (guess == token)
            self._tried[known] = self._tried[known] * KEEP + 1.0
            if guess != token:
                return

    def _rate(self, match: int) -> float:
        known = min(match, LONGEST_MATCH)
        return (self._right[known] + known) / (self._tried[known] + known + SHORTEST_MATCH)
