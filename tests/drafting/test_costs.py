"""What a round costs, by bytes and by seconds."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle31_hf.drafting.costs import LATEST, OVERHEAD, PLAIN, WIDTH, RoundCosts


def timed(seconds: dict[tuple[bool, int], list[float]]) -> RoundCosts:
    costs = RoundCosts(0.1, 12)
    for kind, each in seconds.items():
        for round_s in each:
            costs.record(kind, round_s)
    return costs


def test_by_bytes_before_anything_was_timed() -> None:
    costs = RoundCosts(0.1, 12)
    assert costs.drafted(0) == costs.looked_up(0) == 1.0
    assert costs.drafted(4) == pytest.approx(1.0 + OVERHEAD + 4 * (WIDTH + 0.1))
    assert costs.looked_up(4) == pytest.approx(1.0 + OVERHEAD + 4 * WIDTH)


def test_by_seconds_once_there_are_some_of_rounds_with_and_without() -> None:
    plain, drafted = {PLAIN: [0.01] * 8}, {(True, 7): [0.03] * 8}
    assert timed(drafted).drafted(7) == RoundCosts(0.1, 12).drafted(7), "nothing to compare them with"
    costs = timed(plain | drafted)
    assert costs.drafted(7) == pytest.approx(3.0)
    assert RoundCosts(0.1, 12).drafted(3) < costs.drafted(3) < 3.0, "between two that were timed"
    assert costs.looked_up(7) < 3.0, "without the drafter's steps"


def test_costs_rise_with_the_draft() -> None:
    costs = timed({PLAIN: [0.01] * 8, (True, 2): [0.04] * 8, (True, 9): [0.02] * 8})
    table = [costs.drafted(depth) for depth in range(13)]
    assert table == sorted(table)


def test_a_few_slow_rounds_are_not_believed_everything() -> None:
    few = timed({PLAIN: [0.01] * 8, (True, 7): [0.2] * 4})
    assert few.drafted(7) < 5.0 < timed({PLAIN: [0.01] * 8, (True, 7): [0.2] * 8}).drafted(7)


@pytest.mark.parametrize("seed", range(5))
def test_jumps_of_a_busy_machine_are_seen_through(seed: int) -> None:
    dice = random.Random(seed)

    def jumping(seconds: float) -> list[float]:
        return [seconds * (dice.uniform(2, 10) if dice.random() < 0.5 else 1.0) for _ in range(LATEST)]

    costs = timed({PLAIN: jumping(0.01), (True, 7): jumping(0.02)})
    assert costs.drafted(7) == pytest.approx(2.0)


def test_what_is_long_ago_is_forgotten() -> None:
    costs = timed({PLAIN: [0.01] * 8, (True, 7): [0.05] * LATEST + [0.02] * LATEST})
    assert costs.drafted(7) == pytest.approx(2.0)


def test_threads_may_time_rounds_of_one_pair() -> None:
    """Their texts share what rounds cost, and take turns anywhere."""
    costs, before = RoundCosts(0.1, 6), sys.getswitchinterval()

    def write(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(2000):
            costs.record((dice.random() < 0.7, dice.randrange(7)), 1.0 + dice.random())
            assert costs.drafted(6) >= 1.0

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
    finally:
        sys.setswitchinterval(before)
