"""When drafting rests and comes back, counted by hand."""

from __future__ import annotations

from typing import Any

from draft_traces import COSTS, LONGEST, calibrated
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.acceptance_rates import Prior
from eagle31_hf.decoding.adaptive.controller import Decision, DraftController, Source
from eagle31_hf.decoding.adaptive.guard import (
    LONGEST_REST,
    LOSS,
    SHORTEST_REST,
    CollapseGuard,
    GuardState,
)

LOSING, WINNING = (-0.8, 0.4), (1.5, 1.6)  # tokens won by a round, speedup expected of the next


def rest_lengths(guard: CollapseGuard, rounds: int) -> list[int]:
    """Rounds of each rest of a drafter that always loses."""
    rests, current = [], 0
    for _ in range(rounds):
        if guard.state is GuardState.JUDGING:
            guard.record_judgement(is_promising=True)
            continue
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
    assert rest_lengths(CollapseGuard(), 400)[:6] == [8, 16, 32, LONGEST_REST, LONGEST_REST, LONGEST_REST]


def test_what_promises_nothing_is_not_tried() -> None:
    guard, rests = CollapseGuard(starts_resting=True), []
    for _ in range(4):
        rests.append(1)
        while guard.record_rest(1) is None:
            rests[-1] += 1
        assert guard.rests, "until it is judged nothing is drafted"
        assert guard.record_rest(1) is None, "a round while it waits for that changes nothing"
        assert guard.record_judgement(is_promising=False) is GuardState.RESTING
    assert rests == [LONGEST_REST] * 4
    while guard.record_rest(1) is None:
        pass
    assert guard.record_judgement(is_promising=True) is GuardState.TRYING
    assert not guard.rests


def test_what_knows_nothing_rests_long_at_once() -> None:
    guard, rests = CollapseGuard(), []
    while not guard.rests:
        guard.record_drafts(*LOSING)
    for _ in range(3):
        rests.append(1)
        while guard.record_rest(1) is None:
            rests[-1] += 1
        guard.record_judgement(is_promising=False, knows_nothing=True)
    assert rests == [SHORTEST_REST, LONGEST_REST, LONGEST_REST]


def trying() -> CollapseGuard:
    """One that rested, as earlier texts had it, and promised something."""
    guard = CollapseGuard(starts_resting=True)
    assert [guard.record_rest(1) for _ in range(LONGEST_REST)][-1] is GuardState.JUDGING
    guard.record_judgement(is_promising=True)
    return guard


def test_a_trial_goes_on_while_drafts_are_expected_to_pay() -> None:
    guard = trying()
    assert guard.record_drafts(-1.2 * LOSS, 1.1) is None
    assert guard.record_drafts(-0.2 * LOSS, 0.2) is GuardState.RESTING


def test_a_trial_ends_by_a_gain() -> None:
    guard = trying()
    assert guard.record_drafts(-0.3, 0.9) is None
    assert guard.record_drafts(0.5, 1.0) is GuardState.DRAFTING
    assert guard.record_drafts(-4.1 * LOSS, 0.9) is None, "what would end a trial does not end drafting"


def test_a_loss_alone_is_no_reason_to_rest() -> None:
    guard = CollapseGuard()
    guard.record_drafts(*WINNING)
    for _ in range(20):
        assert guard.record_drafts(-0.8, 1.2) is None
    assert guard.record_drafts(-0.8, 0.9) is GuardState.RESTING


def test_what_has_never_won_is_not_believed_for_long() -> None:
    guard = CollapseGuard()
    assert [guard.record_drafts(-1.0 * LOSS, 1.2) for _ in range(4)] == [None, None, None, GuardState.RESTING]


def test_what_has_won_once_is_not_believed_after_its_trial_fails() -> None:
    guard = CollapseGuard()
    guard.record_drafts(*WINNING)
    while not guard.rests:
        guard.record_drafts(*LOSING)
    while guard.record_rest(1) is None:
        pass
    guard.record_judgement(is_promising=True)
    assert guard.record_drafts(-4.0 * LOSS, 1.2) is GuardState.RESTING


def test_near_break_even_chance_is_not_taken_for_collapse() -> None:
    guard = CollapseGuard()
    assert guard.record_drafts(-1.2 * LOSS, 0.97) is None
    assert CollapseGuard().record_drafts(-1.2 * LOSS, 0.1) is GuardState.RESTING


def test_what_was_won_makes_the_next_rest_short_again() -> None:
    guard = CollapseGuard()
    rest_lengths(guard, 200)
    while guard.state is not GuardState.TRYING:
        guard.record_rest(1) if guard.state is GuardState.RESTING else guard.record_judgement(is_promising=True)
    guard.record_drafts(*WINNING)
    for _ in range(3):
        guard.record_drafts(*WINNING)
    while not guard.rests:
        guard.record_drafts(*LOSING)
    rested = 0
    while guard.state is GuardState.RESTING:
        guard.record_rest(1)
        rested += 1
    assert rested == SHORTEST_REST


@given(st.lists(st.tuples(st.floats(-3, 12), st.floats(0.1, 5)), max_size=200))
def test_no_rest_is_longer_than_its_bound(rounds: list[tuple[float, float]]) -> None:
    guard, resting = CollapseGuard(), 0
    for won, speedup in rounds:
        if guard.state is GuardState.JUDGING:
            guard.record_judgement(is_promising=won > 0)
            resting = 0
        elif guard.rests:
            guard.record_rest(1)
            resting += 1
        else:
            resting = 0
            guard.record_drafts(won, speedup)
        assert resting <= LONGEST_REST


def controller(**settings: Any) -> DraftController:
    table = next(iter(COSTS.values())).rounds(LONGEST)
    return DraftController(table, calibrated(table), **settings)


def test_what_was_of_no_use_to_earlier_texts_rests_first() -> None:
    resting = controller(prior=Prior(0.02, 4.0))
    for _ in range(LONGEST_REST):
        assert not resting.decide().looks_back
        resting.record(Decision(Source.NOTHING), 0, [0])
    assert resting.decide().looks_back
