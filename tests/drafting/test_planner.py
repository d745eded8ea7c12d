"""The planner on sequences: what it drafts behind what was accepted, by costs that are known or timed.

A trace knows at each position of a text how many draft tokens would be right, and so what every policy could have had:
a policy is compared with the best fixed length in hindsight, by the modelled seconds that it is given as costs.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_replay import MACHINES, DraftTrace, Machine, ReplayedText, replay

import eagle31_hf.drafting
from eagle31_hf.drafting.costs import WIDTH, WIDTH_IN_HALF, RoundCosts
from eagle31_hf.drafting.planner import LONGEST_REST, Planner, Steering, steer
from eagle31_hf.drafting.shape import DraftShape

LONGEST = 12
COSTS = {name: MACHINES[name] for name in ("float32", "bfloat16", "card", "graphs")}


def bernoulli(rates: Callable[[int], float], length: int, seed: int) -> DraftTrace:
    """A drafter whose token at position `t` is right with chance `rates(t)` whatever the draft."""
    dice = random.Random(seed)
    right, run = [], 0
    for hit in reversed([dice.random() < rates(t) for t in range(length)]):
        right.append(run)
        run = min(run + 1, 64) if hit else 0
    return DraftTrace(tuple(reversed(right)))


KINDS: dict[str, Callable[[int, int], float]] = {
    "good": lambda t, length: 0.85,
    "middling": lambda t, length: 0.55,
    "bad": lambda t, length: 0.03,
    "never": lambda t, length: 0.0,
    "always": lambda t, length: 1.0,
    "drifting": lambda t, length: 0.9 - 0.85 * t / length,
    "improving": lambda t, length: 0.05 + 0.85 * t / length,
    "alternating": lambda t, length: (0.9, 0.05)[t // 250 % 2],
    "flickering": lambda t, length: float(t // 6 % 2 == 0),  # faster than anything can follow
    "collapsing": lambda t, length: 0.9 if t < length // 2 else 0.0,
}
"""Chance of each token of a text to be drafted right."""


def synthetic(kind: str, length: int = 2000, seed: int = 0) -> DraftTrace:
    return bernoulli(lambda t: KINDS[kind](t, length), length, seed)


def best_fixed_s(trace: DraftTrace, costs: Machine) -> float:
    """Seconds of the best fixed length in hindsight, none included."""

    def fixed_s(depth: int) -> float:
        at = rounds = 0
        while at < len(trace):
            at += min(trace.right[at], depth) + 1
            rounds += 1
        return rounds * costs.seconds(depth)

    return min(map(fixed_s, range(LONGEST + 1)))


def write(
    trace: DraftTrace, machine: str, clock: Callable[[], float] = lambda: 1.0, costs: RoundCosts | None = None, **how
) -> ReplayedText:
    """A text by a planner that knows bytes at first, and is given the seconds of its rounds."""
    shape = how.pop("shape", DraftShape(LONGEST))
    if not trace.written:  # nothing in it repeats itself
        trace = DraftTrace(trace.right, trace.sure, written=tuple(range(1, len(trace) + 1)))
    width = WIDTH_IN_HALF if machine == "bfloat16" else WIDTH
    costs = costs or RoundCosts(0.1, shape.depth, width)
    planner = Planner(shape, lambda rows: costs, **how)
    return replay(planner, trace, COSTS[machine], clock=clock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", COSTS)
def test_close_to_the_best_length_in_hindsight(machine: str, kind: str) -> None:
    """On recorded drafts: tests/test_studies.py."""
    traces = [synthetic(kind, 1500, seed) for seed in range(2)]
    spent = sum(write(trace, machine).seconds for trace in traces)
    assert spent <= 1.09 * sum(best_fixed_s(trace, COSTS[machine]) for trace in traces)


@pytest.mark.parametrize("machine", ["card", "graphs"])
@pytest.mark.parametrize("busy", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("lengths", [(), (7,)], ids=["any length", "one length"])
def test_a_busy_machine_does_not_make_a_good_drafter_rest(machine: str, busy: float, lengths: tuple[int, ...]) -> None:
    """Seconds jump by 2 to 10 at random; by them alone the drafter would not pay."""
    passes = fixed = 0
    for seed in range(4):
        dice = random.Random(seed)
        trace = bernoulli(lambda t: 0.9, 400, seed)

        def jump(dice: random.Random = dice) -> float:
            return dice.uniform(2, 10) if dice.random() < busy else 1.0

        passes += len(write(trace, machine, jump, shape=DraftShape(7), lengths=lengths).rounds)
        at = 0
        while at < len(trace):
            at, fixed = at + min(trace.right[at], 7) + 1, fixed + 1
    assert fixed >= 0.95 * passes


def test_rests_get_longer_until_something_is_accepted() -> None:
    rounds = write(synthetic("never", 400), "card").rounds
    drafts = [done.at for done in rounds if done.drafted]
    rests = [after - before - 1 for before, after in pairwise(drafts) if after - before > 2]
    assert rests[:4] == [8, 16, 32, 48]
    assert set(rests[4:]) == {LONGEST_REST}


def test_a_drafter_that_knows_the_text_again_is_back_within_a_rest() -> None:
    trace = bernoulli(lambda t: 0.0 if t < 300 else 1.0, 600, 0)
    first = next(done.at for done in write(trace, "card").rounds if done.at >= 300 and done.drafted > 2)
    assert first <= 300 + LONGEST_REST + 4


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    text = tuple(range(40)) * 4
    trace = DraftTrace((0,) * 120, prompt=text[:40], written=text[40:])
    rounds = write(trace, "card").rounds
    assert sum(done.accepted for done in rounds if done.looked_up) > 80
    assert not any(done.looked_up for done in write(trace, "card", schedule="constant").rounds)


def test_without_a_drafter_the_text_alone_is_drafted_from() -> None:
    text = tuple(range(40)) * 2
    trace = DraftTrace((9,) * 40, prompt=text[:40], written=text[40:])
    rounds = write(trace, "card", has_drafter=False).rounds
    assert all(done.looked_up for done in rounds if done.drafted)
    assert sum(done.accepted for done in rounds) > 25


def test_constant_drafts_one_length_and_rests_after_eight_rounds_in_vain() -> None:
    rounds = write(synthetic("never", 60), "card", shape=DraftShape(5), schedule="constant").rounds
    assert [done.drafted for done in rounds[:17]] == [5] * 8 + [0] * 8 + [5]
    good = write(synthetic("good", 300), "card", shape=DraftShape(5), schedule="constant").rounds
    assert {done.drafted for done in good[:-2]} == {5}


def test_pid_follows_acceptance_to_both_ends() -> None:
    long = write(synthetic("always", 600), "card", schedule="pid", shape=DraftShape(LONGEST)).rounds
    assert long[-4].drafted == LONGEST
    short = write(bernoulli(lambda t: 0.4, 600, 0), "card", schedule="pid", shape=DraftShape(LONGEST)).rounds
    assert 1 <= sum(done.drafted for done in short[-60:-1]) / 59 <= 4
    state = Steering(5.0, 5.0)
    assert steer(state, 1.0, 0.4, 12).length > 5.0 > steer(state, 0.0, 0.4, 12).length


def test_plain_rounds_are_timed_until_their_seconds_are_known() -> None:
    costs = RoundCosts(0.1, LONGEST)
    first = write(synthetic("always", 200), "card", costs=costs)
    assert sum(not done.drafted for done in first.rounds[:-1]) == 2
    assert sum(not done.drafted for done in write(synthetic("always", 200), "card", costs=costs).rounds[:-1]) == 0


def test_a_busy_beginning_is_forgotten() -> None:
    """Three tokens took long while the machine was busy, so six were drafted since; the machine has long been idle."""
    costs = RoundCosts(0.1, 6)
    for _ in range(10):
        costs.record((False, 0), 1.0)
        costs.record((True, 3), 2.4)
        costs.record((True, 6), 2.2)
    planner, drafted = Planner(DraftShape(6), lambda rows: costs), []
    for _ in range(1000):
        plan = planner.next_draft([0, 1], None, 100)
        drafted.append(plan.shape.depth)
        accepted = [min(plan.shape.depth, 3)] * 2
        planner.record(plan, drafted[-1], [0, 1], accepted, 1.0 + 0.2 * drafted[-1])
    assert drafted[:250] == [6] * 250
    assert drafted[-200:].count(3) > 150


@given(st.integers(0, 2**16), st.sampled_from(["planned", "constant", "pid"]), st.sampled_from([0.0, 0.02]))
def test_asking_twice_changes_nothing(seed: int, schedule: str, doubt: float) -> None:
    dice = random.Random(seed)
    shape = DraftShape(6, min_confidence=doubt)
    costs = RoundCosts(0.1, 6)
    planner = Planner(shape, lambda rows: costs, schedule=schedule)
    for _ in range(40):
        plan = planner.next_draft([0], None, 100)
        assert planner.next_draft([0], None, 100) == plan
        assert 0 <= plan.shape.depth <= 6
        drafted = plan.shape.depth and dice.randint(1, plan.shape.depth)
        accepted = dice.randint(0, drafted)
        planner.record(plan, drafted, [0], [accepted], dice.random())


@pytest.mark.parametrize("name", ["plan", "costs", "lookup", "planner"])
def test_decisions_import_neither_torch_nor_a_clock(name: str) -> None:
    path = Path(eagle31_hf.drafting.__path__[0]) / f"{name}.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    assert not names & {"torch", "transformers", "time", "datetime", "random"}
