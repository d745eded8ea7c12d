"""Whether to draft at all: rounds' figures in, a wish out. No torch.

A drafter that is never right costs its own time and a wider forward in every round. What was accepted so far says so,
and nothing else is looked at: not the clock, so that a seed gives the same text twice, and not the drafts to come, so
that what is written keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

PATIENCE = 8
"""Rounds in a row without an accepted draft after which drafting rests. A drafter whose first token is right every
other time meets so many by chance once in some 500 rounds."""

TRIAL = 2
"""Rounds a drafter gets after a rest."""

SHORTEST_REST, LONGEST_REST = 8, 128
"""Rounds without drafts: at first, and at most. Each trial in vain doubles them."""


class Patience:
    """One generation's trust in its drafter."""

    def __init__(self) -> None:
        self._trust = PATIENCE  # rounds in vain that are left
        self._rest = SHORTEST_REST
        self._resting = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the next round had better draft nothing."""
        return self._resting > 0

    def record_round(self, accepted: Sequence[int]) -> None:
        """Learn what the rows accepted of the drafts they were given, if they were given any."""
        if self._resting:
            self._resting -= 1
        elif any(accepted):
            self._trust, self._rest = PATIENCE, SHORTEST_REST
        else:
            self._trust -= 1
            if self._trust == 0:
                self._resting, self._trust = self._rest, TRIAL
                self._rest = min(2 * self._rest, LONGEST_REST)
