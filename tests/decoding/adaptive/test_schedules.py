"""Draft lengths: arithmetic by hand, a controller that settles, bounds that hold."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest
from draft_traces import COSTS, LONGEST
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.acceptance_rates import AcceptanceRates, Prior
from eagle31_hf.decoding.adaptive.costs import RoundCosts, choose_length
from eagle31_hf.decoding.adaptive.schedules import CalibratedSchedule, ConstantSchedule, HeuristicSchedule, PidSchedule
from eagle31_hf.errors import ConfigurationError

FLAT = RoundCosts(((1, 1.0), (64, 1.0)), drafter_step_s=0.1, absorb_s=0.1)


def reach_of(rate: float, length: int = LONGEST) -> list[float]:
    return list(accumulate([rate] * length, mul))


def accepted_of(rate: float, drafted: int, dice: random.Random) -> int:
    return next((i for i in range(drafted) if dice.random() >= rate), drafted)


def test_seconds_of_rounds() -> None:
    costs = RoundCosts(
        ((1, 1.0), (2, 2.0), (4, 3.0)), drafter_step_s=0.1, absorb_s=0.2, round_s=0.5, plain_round_s=0.25
    )
    assert [costs.target_s(width) for width in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 2.0, 2.5, 3.0, 4.0])
    table = costs.rounds(3)
    assert table.plain_s == 1.25
    assert table.speculative_s == pytest.approx((1.25, 2.7, 3.3, 3.9))
    assert table.lookup_s == pytest.approx((1.25, 2.5, 3.0, 3.5))
    assert table.reading_s == pytest.approx(0.2)
    assert costs.rounds(2, rows=2).speculative_s == pytest.approx((2.25, 3.7, 4.8))
    assert costs.rounds(2, nodes=4).speculative_s[1:] == pytest.approx((3.7, 3.8))


def test_a_graph_between_two_widths_costs_as_much_as_the_wider() -> None:
    costs = RoundCosts(((1, 1.0), (8, 2.0), (16, 3.0)), 0.1, 0.1, in_buckets=True)
    assert [costs.target_s(width) for width in (1, 2, 8, 9, 16, 24)] == pytest.approx([1, 2, 2, 3, 3, 4])


@pytest.mark.parametrize(
    ("forward_s", "step_s"),
    [((), 0.1), (((2, 1.0),), 0.1), (((1, 1.0), (1, 2.0)), 0.1), (((1, float("nan")),), 0.1), (((1, 1.0),), -1.0)],
)
def test_seconds_that_no_clock_can_have_shown_are_refused(forward_s, step_s: float) -> None:
    with pytest.raises(ConfigurationError, match="wanted"):
        RoundCosts(forward_s, step_s, 0.1)


def test_the_best_length_by_hand() -> None:
    # One more draft of rate r at depth d brings r**d tokens for 0.1 s, at some 3.4 tokens per second.
    table = FLAT.rounds(LONGEST)
    best = choose_length(table, reach_of(0.8), range(1, LONGEST + 1))
    speeds = [sum(0.8**i for i in range(d + 1)) / (1.0 + 0.1 * d) for d in range(1, LONGEST + 1)]
    assert best.depth == 1 + speeds.index(max(speeds))
    assert best.speedup == pytest.approx(max(speeds))
    assert table.break_even_tokens(4) == pytest.approx(1.4)


def test_calibrated_drafts_long_where_it_is_cheap_and_right() -> None:
    lengths = {}
    for machine, costs in COSTS.items():
        table = costs.rounds(LONGEST)
        schedule = CalibratedSchedule(table, range(1, LONGEST + 1))
        lengths[machine] = [schedule.length(reach_of(rate)) for rate in (0.3, 0.6, 0.9)]
        assert lengths[machine] == sorted(lengths[machine])
    assert lengths["bf16"][2] < lengths["fp32"][2] <= lengths["gpu"][2], lengths


def test_a_few_lengths_are_enough() -> None:
    schedule = CalibratedSchedule(COSTS["graph"].rounds(7), (2, 4, 7))
    assert {schedule.length(reach_of(rate, 7)) for rate in (0.05, 0.3, 0.6, 0.9)} <= {2, 4, 7}


@pytest.mark.parametrize("machine", ["fp32", "gpu", "graph"])
@pytest.mark.parametrize("rate", [0.5, 0.7, 0.85])
def test_pid_settles_where_one_more_token_no_longer_pays(machine: str, rate: float) -> None:
    table, dice = COSTS[machine].rounds(LONGEST), random.Random(0)
    schedule, rates, lengths = PidSchedule(table, 2, LONGEST), AcceptanceRates(LONGEST), []
    for _ in range(800):
        length = schedule.length(rates.reach())
        accepted = accepted_of(rate, length, dice)
        rates.record(length, [accepted])
        schedule.record(length, [accepted], rates.reach())
        lengths.append(length)
    settled = lengths[200:]
    mean = sum(settled) / len(settled)
    assert abs(sum(settled[:300]) - sum(settled[300:])) / 300 < 0.7, "no drift once it has settled"
    best = choose_length(table, reach_of(rate), range(1, LONGEST + 1))
    pid_speed = sum(choose_length(table, reach_of(rate), (length,)).speedup for length in settled) / len(settled)
    assert pid_speed >= 0.95 * best.speedup, (mean, best)


def test_pid_does_not_wind_up() -> None:
    """After a thousand rounds at the upper bound it takes as long to come down as after thirty."""
    table = COSTS["gpu"].rounds(LONGEST)

    def rounds_to_come_down(good_rounds: int) -> int:
        schedule, reach = PidSchedule(table, 5, LONGEST), reach_of(0.95)
        for _ in range(good_rounds):
            schedule.record(schedule.length(reach), [schedule.length(reach)], reach)
        assert schedule.length(reach) == LONGEST
        for count in range(200):
            if schedule.length(reach) <= 3:
                return count
            schedule.record(schedule.length(reach), [0], reach_of(0.3))
        pytest.fail("never came down")

    assert rounds_to_come_down(1000) <= rounds_to_come_down(60) + 1


@given(
    accepted=st.lists(st.integers(0, LONGEST), max_size=60),
    start=st.integers(1, LONGEST),
    kind=st.sampled_from(["constant", "heuristic", "pid", "calibrated"]),
    rows=st.integers(1, 3),
)
def test_lengths_keep_to_their_bounds(accepted: list[int], start: int, kind: str, rows: int) -> None:
    table, rates = COSTS["fp32"].rounds(LONGEST), AcceptanceRates(LONGEST)
    schedule = {
        "constant": ConstantSchedule(start),
        "heuristic": HeuristicSchedule(start, LONGEST),
        "pid": PidSchedule(table, start, LONGEST),
        "calibrated": CalibratedSchedule(table, range(1, LONGEST + 1)),
    }[kind]
    for count in accepted:
        length = schedule.length(rates.reach())
        assert 1 <= length <= LONGEST
        assert schedule.length(rates.reach()) == length, "asking changes nothing"
        rates.record(length, [min(count, length)] * rows)
        schedule.record(length, [min(count, length)] * rows, rates.reach())
        assert all(0.0 < rate < 1.0 for rate in rates.rates())


def test_heuristic_is_transformers_own() -> None:
    schedule = HeuristicSchedule(5, LONGEST)
    for accepted, then in ((5, 7), (7, 9), (3, 8), (0, 7)):
        schedule.record(schedule.length([]), [accepted], [])
        assert schedule.length([]) == then


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
def test_rates_find_the_drafters_own(rate: float) -> None:
    dice, rates = random.Random(1), AcceptanceRates(6)
    found = []
    for count in range(400):
        rates.record(6, [accepted_of(rate, 6, dice)])
        if count >= 100:
            found.append(rates.overall())
    assert sum(found) / len(found) == pytest.approx(rate, abs=0.06)


def test_a_prior_is_worth_its_weight() -> None:
    sceptical = AcceptanceRates(4, Prior(rate=0.1, weight=8.0))
    assert sceptical.overall() == pytest.approx(0.1)
    sceptical.record(4, [4])
    assert 0.1 < sceptical.overall() < AcceptanceRates(4, Prior(0.7, 2.0)).overall()
