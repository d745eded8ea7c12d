"""Whether to draft at all: rests while drafts cost more than they bring, tries again, and comes back.

What drafting has won or lost against plain decoding is counted in tokens. A rest begins after a loss, not at the first
bad round; a trial ends one after a gain, so that a drafter on the edge does not flicker. Each trial in vain makes the
next rest longer, up to a bound within which a returning domain is noticed.
"""

from __future__ import annotations

from enum import Enum
from math import inf

SMALLEST_LOSS, LOSS_TIMES_SLOWDOWN = 1.0, 0.4
"""Tokens that may be lost since drafting last was at its best: more of them the less a further round is expected to
lose, since near break-even chance alone loses some."""

TRIAL_LOSS, TRIAL_GAIN = 0.3, 0.8
"""Tokens lost at which a trial has failed, and won at which it has succeeded."""

ROUNDS_OF_GRACE = 4
"""Rounds that a drafter gets which has won nothing in this text yet; of one that has, more is expected."""

SHORTEST_REST = 8
"""Tokens (of a row) before the first trial."""

TRIAL_SHARE = 0.01
"""Share of plain decoding's time that trials in vain may take, where the longest rest allows it."""

REST_BOUNDS = (8, 48)
"""What the longest rest may be, however cheap or dear a trial is: a returning domain is used within 64 tokens."""


class GuardState(Enum):
    """What is being done."""

    DRAFTING = "drafting"
    RESTING = "resting"
    TRYING = "trying"


class CollapseGuard:
    """One generation's trust in its drafter.

    Args:
        trial_loss: tokens that a draft in vain costs.
        starts_resting: whether what earlier generations accepted speaks against drafting.
    """

    def __init__(self, trial_loss: float, *, starts_resting: bool = False):
        self.longest_rest = _longest_rest(trial_loss)
        self.state = GuardState.RESTING if starts_resting else GuardState.DRAFTING
        # What earlier texts have shown need not be learnt again by short rests.
        self._rest_left = self._next_rest = self.longest_rest if starts_resting else SHORTEST_REST
        self._balance = 0.0  # tokens won by the drafts of this state
        self._best = 0.0  # the most they ever were
        self._has_won = False  # whether drafts ever did
        self._rounds = 0  # with drafts

    @property
    def rests(self) -> bool:
        """Whether the next round had better draft nothing."""
        return self.state is GuardState.RESTING

    @property
    def is_unsure(self) -> bool:
        """Whether a trial has won nothing yet."""
        return self.state is GuardState.TRYING and self._balance <= 0.0

    def record_drafts(self, won: float, expected_speedup: float) -> GuardState | None:
        """After a round with drafts. Returns the new state if it changed.

        Args:
            won: tokens it wrote more than plain decoding would have in its time; negative if fewer.
            expected_speedup: of further drafts, by all that is known.
        """
        self._balance += won
        self._best = max(self._best, self._balance)
        self._rounds += 1
        self._has_won = self._has_won or self._balance >= TRIAL_GAIN
        if self.state is GuardState.DRAFTING:
            if self._best - self._balance < self._bearable_loss(expected_speedup):
                return None
            if self._balance > 0:
                self._next_rest = SHORTEST_REST
            return self._begin_rest()
        if self._balance <= -TRIAL_LOSS:
            return self._begin_rest()
        return self._enter(GuardState.DRAFTING) if self._balance >= TRIAL_GAIN else None

    def _bearable_loss(self, expected_speedup: float) -> float:
        """Tokens that drafts may lose before a rest begins."""
        if not self._has_won and self._rounds >= ROUNDS_OF_GRACE:
            return SMALLEST_LOSS
        slowdown = 1.0 - expected_speedup
        return max(SMALLEST_LOSS, LOSS_TIMES_SLOWDOWN / slowdown) if slowdown > 0.0 else inf

    def record_rest(self, tokens: int) -> GuardState | None:
        """After a round that did not ask the drafter and wrote so many tokens per row."""
        if self.state is not GuardState.RESTING:
            return None
        self._rest_left -= tokens
        return self._enter(GuardState.TRYING) if self._rest_left <= 0 else None

    def _begin_rest(self) -> GuardState:
        """Rest, and longer the next time, unless drafting wins something before."""
        self._rest_left = self._next_rest
        self._next_rest = min(2 * self._next_rest, self.longest_rest)
        return self._enter(GuardState.RESTING)

    def _enter(self, state: GuardState) -> GuardState:
        self.state, self._balance, self._best = state, 0.0, 0.0
        return state


def _longest_rest(loss: float) -> int:
    """`loss`: tokens that one draft in vain costs; a trial goes on until it has cost `TRIAL_LOSS`."""
    return min(max(round(max(loss, TRIAL_LOSS) / TRIAL_SHARE), REST_BOUNDS[0]), REST_BOUNDS[1])
