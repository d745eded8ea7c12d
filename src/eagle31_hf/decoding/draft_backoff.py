"""Whether to draft at all. A drafter that is never right costs its own time and a wider forward in every round.

After some rounds in which no row accepted a draft drafting pauses, then the drafter gets a short retry, and each failed
retry doubles the pause. Only what was accepted counts: not the clock, so that a seed gives the same text twice, and not
the drafts to come, so that what is written keeps its distribution. Plain counting, no torch.
"""

from __future__ import annotations

from ..drafting.plan import DraftPlan, DraftPolicy, RoundState, RoundStats

ROUNDS_IN_VAIN = 8
"""Rounds in a row without an accepted draft after which drafting pauses. A drafter whose first token is right every
other time meets so many by chance once in some 500 rounds."""

RETRY_ROUNDS = 2
"""Rounds a drafter gets after a pause."""

SHORTEST_PAUSE, LONGEST_PAUSE = 8, 128
"""Rounds without drafts: at first, and at most. Each failed retry doubles them."""


class DraftBackoff(DraftPolicy):
    """Drafts as much as there is room for, or nothing while that is in vain."""

    def __init__(self) -> None:
        self._tries_left = ROUNDS_IN_VAIN
        self._next_pause = SHORTEST_PAUSE
        self._pause_left = 0

    def next_draft(self, state: RoundState) -> DraftPlan:
        """The largest draft, or none during a pause."""
        return DraftPlan.skip() if self._pause_left else DraftPlan(state.largest)

    def record(self, stats: RoundStats) -> None:
        """Learn what the rows accepted of the drafts they were given, if they were given any."""
        if stats.plan.skips:
            self._pause_left -= 1
        elif any(stats.accepted):
            self._tries_left, self._next_pause = ROUNDS_IN_VAIN, SHORTEST_PAUSE
        else:
            self._tries_left -= 1
            if self._tries_left == 0:
                self._pause_left, self._tries_left = self._next_pause, RETRY_ROUNDS
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
