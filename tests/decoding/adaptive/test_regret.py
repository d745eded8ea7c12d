"""Drafts that adapt, on traces: how much slower than the best fixed length in hindsight, and than one per phase."""

from __future__ import annotations

import pytest
from draft_traces import (
    COSTS,
    KINDS,
    LONGEST,
    bernoulli,
    best_fixed_s,
    fixed_s,
    from_hits,
    oracle_s,
    synthetic,
    write,
)
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.schedules import ConstantSchedule, HeuristicSchedule, PidSchedule

MACHINES = tuple(COSTS)


@pytest.mark.parametrize("reads", [False, True], ids=["drafts to try", "reads before a trial"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_close_to_the_best_in_hindsight(machine: str, kind: str, reads: bool) -> None:
    costs = COSTS[machine]
    settings = {"reading_s": costs.absorb_s} if reads else {}
    spent = best = oracle = 0.0
    for seed in range(2):
        trace = synthetic(kind, 1500, seed)
        spent += write(trace, costs, **settings).seconds
        best += best_fixed_s(trace, costs)
        oracle += oracle_s(trace, costs)
    assert spent <= 1.05 * best
    assert spent <= 1.15 * oracle


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("schedule", ["constant", "heuristic", "pid"])
def test_the_guard_keeps_every_schedule_near_plain_decoding(machine: str, schedule: str) -> None:
    make = {
        "constant": lambda table: ConstantSchedule(5),
        "heuristic": lambda table: HeuristicSchedule(5, LONGEST),
        "pid": lambda table: PidSchedule(table, 5, LONGEST),
    }[schedule]
    costs = COSTS[machine]
    for kind in ("never", "bad", "collapsing"):
        trace = synthetic(kind, 1500)
        assert write(trace, costs, make, reading_s=costs.absorb_s).seconds <= 1.03 * fixed_s(trace, costs, 0), kind


@given(hits=st.lists(st.booleans(), min_size=50, max_size=300), machine=st.sampled_from(MACHINES))
def test_no_text_makes_it_much_slower_than_plain(hits: list[bool], machine: str) -> None:
    """Whatever the drafter gets right, the loss is a share of the text and a few tokens at the beginning."""
    costs, trace = COSTS[machine], from_hits(hits)
    plain_s = fixed_s(trace, costs, 0)
    assert write(trace, costs).seconds <= 1.06 * plain_s + 5 * costs.rounds(1).plain_s


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_comes_back_within_64_tokens(machine: str, reads: bool) -> None:
    """Good, then a stretch in which nothing is right, then good again: the speed of before is there 64 tokens later."""
    costs = COSTS[machine]
    away, back, end = 400, 1000, 2000
    settings = {"reading_s": costs.absorb_s} if reads else {}
    before = after = 0.0
    for seed in range(4):
        trace = bernoulli(lambda t: 0.0 if away <= t < back else 0.9, end, seed)
        written = write(trace, costs, **settings)
        before += speed(written, costs, 0, away)
        after += speed(written, costs, back + 64, end)
        assert any(what == "resume" for what, _ in written.events)
    assert after >= 0.9 * before


def speed(written, costs, start: int, end: int) -> float:
    """Tokens per modelled second between two positions."""
    table = costs.rounds(LONGEST)
    return (end - start) / sum(table.speculative_s[depth] for at, depth in written.rounds if start <= at < end)


def test_every_change_is_told_with_its_reason() -> None:
    events = write(synthetic("alternating"), COSTS["fp32"]).events
    assert {"rest", "resume", "length"} <= {what for what, _ in events}
    assert all("%" in why for _, why in events)
