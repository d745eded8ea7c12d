"""Whether to draft at all: rests while drafts cost more than they bring, tries again, and comes back.

What drafting has lost against plain decoding since it last was at its best is counted in tokens. A rest begins after a
loss, not at the first bad round. At its end the drafter is judged by what it would have drafted meanwhile, and only if
that promises something is it tried. Each rest in vain makes the next one longer, up to a bound within which a returning
domain is noticed.
"""

from __future__ import annotations

from enum import Enum
from math import inf

LOSS = 0.5
"""Tokens lost at which drafting rests if further drafts are expected to bring nothing. Near break-even chance alone
loses some: the smaller the expected slowdown, the more are borne. What has won nothing yet, in this text or since a
rest, may lose four times as many whatever is expected of it."""

SHORTEST_REST = 8
"""Tokens (of a row) before the drafter is judged again."""

LONGEST_REST = 48
"""The same at most: a returning domain is used within 64 tokens."""


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
        self._lost = 0.0  # tokens, since drafts were at their best
        self._has_won = False  # whether drafts ever did, in this text or since the last rest

    @property
    def rests(self) -> bool:
        """Whether the next round had better draft nothing."""
        return self.state in (GuardState.RESTING, GuardState.JUDGING)

    def record_drafts(self, won: float, expected_speedup: float) -> GuardState | None:
        """After a round with drafts. Returns the new state if it changed.

        Args:
            won: tokens it wrote more than plain decoding would have in its time; negative if fewer.
            expected_speedup: of further drafts, by all that is known.
        """
        self._lost -= won
        if self._lost >= self._bearable_loss(expected_speedup):
            return self._begin_rest()
        if self._lost < 0.0:
            self._lost, self._has_won, self._next_rest = 0.0, True, SHORTEST_REST
            if self.state is GuardState.TRYING:
                return self._enter(GuardState.DRAFTING)
        return None

    def _bearable_loss(self, expected_speedup: float) -> float:
        """Tokens that drafts may lose before a rest begins."""
        bearable = LOSS / (1.0 - expected_speedup) if expected_speedup < 1.0 else inf
        return bearable if self._has_won else min(bearable, 4.0 * LOSS)

    def record_rest(self, tokens: int) -> GuardState | None:
        """After a round that did not ask the drafter and wrote so many tokens per row."""
        if self.state is not GuardState.RESTING:
            return None
        self._rest_left -= tokens
        return self._enter(GuardState.JUDGING) if self._rest_left <= 0 else None

    def shorten_rest(self) -> None:
        """Judge the drafter soon: what it is asked about may have changed."""
        self._rest_left = min(self._rest_left, SHORTEST_REST)

    def record_judgement(self, *, is_promising: bool, knows_nothing: bool = False) -> GuardState:
        """After the drafter was judged by what it missed. Returns the new state.

        Args:
            is_promising: it had better be tried.
            knows_nothing: none of its tokens would have been right: there is no hurry to judge it again.
        """
        if is_promising:
            return self._enter(GuardState.TRYING)
        if knows_nothing:
            self._next_rest = LONGEST_REST
        return self._begin_rest()

    def _begin_rest(self) -> GuardState:
        """Rest, and longer the next time, unless drafting wins something before."""
        self._rest_left = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        return self._enter(GuardState.RESTING)

    def _enter(self, state: GuardState) -> GuardState:
        self.state, self._lost = state, 0.0
        self._has_won = self._has_won and state is not GuardState.TRYING
        return state
