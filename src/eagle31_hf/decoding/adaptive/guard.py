"""Whether to draft at all: rests while drafts cost more than they bring, tries again, and comes back.

What drafting has won or lost against plain decoding is counted in tokens. A rest begins after a loss, not at the first
bad round. At its end the drafter is judged by what it would have drafted meanwhile; only if that promises something is
it tried, and drafts go on after a gain, so that a drafter on the edge does not flicker. Each rest in vain makes the
next one longer, up to a bound within which a returning domain is noticed.
"""

from __future__ import annotations

from enum import Enum
from math import inf

SMALLEST_LOSS, LOSS_TIMES_SLOWDOWN = 1.0, 0.4
"""Tokens that may be lost since drafting last was at its best: more of them the less a further round is expected to
lose, since near break-even chance alone loses some."""

TRIAL_LOSS, TRIAL_GAIN = 0.3, 0.8
"""Tokens lost at which a trial has failed if further drafts are not expected to pay, and won at which it has succeeded.
One round by a graph, whose drafts have one length, may lose more than that by chance alone."""

ROUNDS_OF_GRACE, GRACE_LOSS = 4, 2.4
"""Rounds that a drafter gets which has won nothing in this text yet, fewer once they have lost so many tokens: where a
draft is dear, it is soon known by what it would have drafted in a rest. Of one that has won, more is expected."""

SHORTEST_REST = 8
"""Tokens (of a row) before the drafter is judged again."""

LONGEST_REST = 48
"""The same at most: a returning domain is used within 64 tokens."""

LONGEST_HOPELESS_REST = 192
"""The same where the drafter knew nothing of the prompt and has not been tried since: no domain has gone that could
return. That a few tokens would have been kept says nothing: of drawn ones, some no draft could have been worse than."""


class GuardState(Enum):
    """What is being done."""

    DRAFTING = "drafting"
    RESTING = "resting"
    JUDGING = "judging"
    TRYING = "trying"


class CollapseGuard:
    """One generation's trust in its drafter.

    Args:
        starts_resting: whether what earlier generations accepted speaks against drafting.
    """

    def __init__(self, *, starts_resting: bool = False):
        self.state = GuardState.RESTING if starts_resting else GuardState.DRAFTING
        # What earlier texts have shown need not be learnt again by short rests.
        self._rest_left = self._next_rest = LONGEST_REST if starts_resting else SHORTEST_REST
        self._balance = 0.0  # tokens won by the drafts of this state
        self._best = 0.0  # the most they ever were
        self._has_won = False  # whether drafts ever did
        self._rounds = 0  # with drafts
        self._longest_rest = LONGEST_REST

    @property
    def rests(self) -> bool:
        """Whether the next round had better draft nothing."""
        return self.state in (GuardState.RESTING, GuardState.JUDGING)

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
        if self._balance <= -TRIAL_LOSS and expected_speedup < 1.0:
            return self._begin_rest()
        return self._enter(GuardState.DRAFTING) if self._balance >= TRIAL_GAIN else None

    def _bearable_loss(self, expected_speedup: float) -> float:
        """Tokens that drafts may lose before a rest begins."""
        is_known = self._rounds >= ROUNDS_OF_GRACE or self._balance <= -GRACE_LOSS
        if not self._has_won and is_known:
            return SMALLEST_LOSS
        slowdown = 1.0 - expected_speedup
        return max(SMALLEST_LOSS, LOSS_TIMES_SLOWDOWN / slowdown) if slowdown > 0.0 else inf

    def record_rest(self, tokens: int) -> GuardState | None:
        """After a round that did not ask the drafter and wrote so many tokens per row."""
        if self.state is not GuardState.RESTING:
            return None
        self._rest_left -= tokens
        return self._enter(GuardState.JUDGING) if self._rest_left <= 0 else None

    def shorten_rest(self) -> None:
        """Judge the drafter soon: what it is asked about may have changed."""
        self._rest_left = min(self._rest_left, SHORTEST_REST)

    def rest_at_first(self, *, is_hopeless: bool) -> None:
        """Begin with a rest, before any drafts, and with long ones if what follows promises nothing either.

        Args:
            is_hopeless: the prompt leaves no doubt: there is no hurry to judge it again.
        """
        if is_hopeless:
            self._next_rest, self._longest_rest = LONGEST_HOPELESS_REST // 2, LONGEST_HOPELESS_REST
        self._begin_rest()
        self._next_rest = max(self._next_rest, LONGEST_REST)

    def record_judgement(self, *, is_promising: bool, knows_nothing: bool = False) -> GuardState:
        """After the drafter was judged by what it missed. Returns the new state.

        Args:
            is_promising: it had better be tried.
            knows_nothing: none of its tokens would have been right: there is no hurry to judge it again.
        """
        if is_promising:
            self._longest_rest = LONGEST_REST
            self._next_rest = min(self._next_rest, LONGEST_REST)
            return self._enter(GuardState.TRYING)
        if knows_nothing:
            self._next_rest = max(self._next_rest, LONGEST_REST)
        return self._begin_rest()

    def _begin_rest(self) -> GuardState:
        """Rest, and longer the next time, unless drafting wins something before."""
        self._rest_left = self._next_rest
        self._next_rest = min(2 * self._next_rest, self._longest_rest)
        return self._enter(GuardState.RESTING)

    def _enter(self, state: GuardState) -> GuardState:
        self.state, self._balance, self._best = state, 0.0, 0.0
        return state
