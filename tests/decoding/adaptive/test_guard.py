"""When drafting rests and comes back, counted by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.guard import REST_BOUNDS, ROUNDS_OF_GRACE, SHORTEST_REST, CollapseGuard, GuardState

LOSING, WINNING = (-0.8, 0.4), (1.5, 1.6)  # tokens won by a round, speedup expected of the next


def rest_lengths(guard: CollapseGuard, rounds: int) -> list[int]:
    """Rounds of each rest of a drafter that always loses."""
    rests, current = [], 0
    for _ in range(rounds):
        if guard.rests:
            guard.record_rest(1)
            current += 1
            continue
        if current:
            rests.append(current)
        current = 0
        guard.record_drafts(*LOSING)
    return rests


def test_rests_double_up_to_a_bound() -> None:
    assert rest_lengths(CollapseGuard(0.7), 400)[:6] == [8, 16, 32, REST_BOUNDS[1], REST_BOUNDS[1], REST_BOUNDS[1]]
    assert rest_lengths(CollapseGuard(0.1), 400)[:5] == [8, 16, 30, 30, 30], "cheap trials are made more often"


def test_a_loss_alone_is_no_reason_to_rest() -> None:
    guard = CollapseGuard(0.7)
    guard.record_drafts(*WINNING)
    for _ in range(20):
        assert guard.record_drafts(-0.8, 1.2) is None
    assert guard.record_drafts(-0.8, 0.9) is GuardState.RESTING


def test_what_has_never_won_is_not_believed_for_long() -> None:
    guard = CollapseGuard(0.7)
    assert [guard.record_drafts(-0.4, 1.2) for _ in range(ROUNDS_OF_GRACE)] == [
        *[None] * (ROUNDS_OF_GRACE - 1),
        GuardState.RESTING,
    ]


def test_near_break_even_chance_is_not_taken_for_collapse() -> None:
    guard = CollapseGuard(0.7)
    assert guard.record_drafts(-1.2, 0.97) is None
    assert CollapseGuard(0.7).record_drafts(-1.2, 0.5) is GuardState.RESTING


def test_a_trial_ends_by_gain_or_loss_and_not_between() -> None:
    guard = CollapseGuard(0.7, starts_resting=True)
    assert [guard.record_rest(1) for _ in range(REST_BOUNDS[1])][-1] is GuardState.TRYING, "known from earlier texts"
    assert guard.record_drafts(0.4, 1.0) is None
    assert guard.record_drafts(0.5, 1.0) is GuardState.DRAFTING
    assert guard.record_drafts(-0.7, 0.9) is None, "hysteresis: what fails a trial does not end drafting"


def test_what_was_won_makes_the_next_rest_short_again() -> None:
    guard = CollapseGuard(0.7)
    rest_lengths(guard, 200)
    while guard.state is not GuardState.TRYING:
        guard.record_rest(1)
    guard.record_drafts(*WINNING)
    for _ in range(3):
        guard.record_drafts(*WINNING)
    while not guard.rests:
        guard.record_drafts(*LOSING)
    rested = 0
    while guard.rests:
        guard.record_rest(1)
        rested += 1
    assert rested == SHORTEST_REST


@given(st.lists(st.tuples(st.floats(-3, 12), st.floats(0.1, 5)), max_size=200), st.floats(0.01, 5))
def test_no_rest_is_longer_than_its_bound(rounds: list[tuple[float, float]], trial_loss: float) -> None:
    guard, resting = CollapseGuard(trial_loss), 0
    for won, speedup in rounds:
        if guard.rests:
            guard.record_rest(1)
            resting += 1
        else:
            resting = 0
            guard.record_drafts(won, speedup)
        assert resting <= REST_BOUNDS[1]
