"""When drafting rests and comes back, counted by hand."""

from __future__ import annotations

from typing import Any

from draft_traces import COSTS, LONGEST, calibrated
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.acceptance_rates import Prior
from eagle31_hf.decoding.adaptive.controller import FEWEST_JUDGED, Decision, DraftController, Source
from eagle31_hf.decoding.adaptive.guard import (
    GRACE_LOSS,
    LONGEST_HOPELESS_REST,
    LONGEST_REST,
    ROUNDS_OF_GRACE,
    SHORTEST_REST,
    CollapseGuard,
    GuardState,
)

LOSING, WINNING = (-0.8, 0.4), (1.5, 1.6)  # tokens won by a round, speedup expected of the next

HALF = LONGEST_HOPELESS_REST // 2


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


def test_a_trial_goes_on_where_drafts_are_expected_to_pay() -> None:
    guard = CollapseGuard(starts_resting=True)
    while guard.record_rest(1) is None:
        pass
    guard.record_judgement(is_promising=True)
    assert guard.record_drafts(-1.2, 1.1) is None
    assert guard.record_drafts(-1.2, 0.9) is GuardState.RESTING


def test_a_loss_alone_is_no_reason_to_rest() -> None:
    guard = CollapseGuard()
    guard.record_drafts(*WINNING)
    for _ in range(20):
        assert guard.record_drafts(-0.8, 1.2) is None
    assert guard.record_drafts(-0.8, 0.9) is GuardState.RESTING


def test_what_has_never_won_is_not_believed_for_long() -> None:
    guard = CollapseGuard()
    assert [guard.record_drafts(-0.4, 1.2) for _ in range(ROUNDS_OF_GRACE)] == [
        *[None] * (ROUNDS_OF_GRACE - 1),
        GuardState.RESTING,
    ]


def test_dear_drafts_that_have_never_won_are_given_up_sooner() -> None:
    guard = CollapseGuard()
    dear = GRACE_LOSS / 2
    assert [guard.record_drafts(-dear, 1.2) for _ in range(2)] == [None, GuardState.RESTING]


def test_near_break_even_chance_is_not_taken_for_collapse() -> None:
    guard = CollapseGuard()
    assert guard.record_drafts(-1.2, 0.97) is None
    assert CollapseGuard().record_drafts(-1.2, 0.5) is GuardState.RESTING


def test_a_trial_ends_by_gain_or_loss_and_not_between() -> None:
    guard = CollapseGuard(starts_resting=True)
    assert [guard.record_rest(1) for _ in range(LONGEST_REST)][-1] is GuardState.JUDGING, "known from earlier texts"
    guard.record_judgement(is_promising=True)
    assert guard.record_drafts(0.4, 1.0) is None
    assert guard.record_drafts(0.5, 1.0) is GuardState.DRAFTING
    assert guard.record_drafts(-0.7, 0.9) is None, "hysteresis: what fails a trial does not end drafting"


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


def test_what_knows_nothing_of_the_prompt_rests_first() -> None:
    events: list[tuple[str, str]] = []
    knows = controller(on_event=lambda *told: events.append(told))
    knows.record_prompts(16, 1.0)
    knows.record_prompts(FEWEST_JUDGED - 1, 0.0)  # so few say nothing
    knows.record_prompts(0, 0.0)
    assert not knows.guard.rests
    assert not events
    ignorant = controller(on_event=lambda *told: events.append(told))
    ignorant.record_prompts(FEWEST_JUDGED, 0.4)
    for _ in range(SHORTEST_REST):
        assert ignorant.decide() == Decision(Source.NOTHING)
        ignorant.record(Decision(Source.NOTHING), 0, [0])
    assert ignorant.decide().looks_back
    (what, why), *_ = events
    assert what == "rest"
    assert why.startswith("the drafter knows nothing of the prompt")
    ignorant.record_hindsight(7, 6.0)
    assert ignorant.decide().source is Source.DRAFTER, "it may know what is written behind it"


def test_what_knows_neither_the_prompt_nor_what_follows_rests_long() -> None:
    ignorant = controller()
    ignorant.record_prompts(16, 0.4)
    assert rests_of(ignorant, [1.5, 1.5, 1.5]) == [SHORTEST_REST, LONGEST_REST, LONGEST_REST]


def test_what_has_never_known_anything_rests_longest() -> None:
    """A drafter of another target: no domain has gone that could return."""
    hopeless = controller()
    hopeless.record_prompts(16, 0.1)
    assert rests_of(hopeless, [0.1] * 4) == [HALF, LONGEST_HOPELESS_REST, LONGEST_HOPELESS_REST, LONGEST_HOPELESS_REST]
    lucky = controller()
    lucky.record_prompts(16, 0.1)
    assert rests_of(lucky, [1.5] * 3) == [HALF, LONGEST_HOPELESS_REST, LONGEST_HOPELESS_REST]  # not to be tried yet


def test_what_was_worth_a_trial_rests_no_longer_than_others() -> None:
    guard, rests = CollapseGuard(), []
    guard.rest_at_first(is_hopeless=True)
    for is_promising in (False, True, False):
        rests.append(1)
        while guard.record_rest(1) is None:
            rests[-1] += 1
        if guard.record_judgement(is_promising=is_promising) is GuardState.TRYING:
            while not guard.rests:
                guard.record_drafts(*LOSING)
    assert rests == [HALF, LONGEST_HOPELESS_REST, LONGEST_REST]


def rests_of(controller: DraftController, judged: list[float]) -> list[int]:
    """Rounds of each rest, at whose ends so many of 16 first tokens would have been right."""
    rests = []
    for right in judged:
        rests.append(0)
        while not controller.decide().looks_back:
            controller.record(Decision(Source.NOTHING), 0, [0])
            rests[-1] += 1
        controller.record_hindsight(16, right)
    return rests


def test_what_earlier_texts_say_is_no_less_than_what_a_prompt_says() -> None:
    resting = controller(prior=Prior(0.02, 4.0))
    resting.record_prompts(16, 0.0)
    for _ in range(LONGEST_REST):
        assert not resting.decide().looks_back
        resting.record(Decision(Source.NOTHING), 0, [0])
    assert resting.decide().looks_back
