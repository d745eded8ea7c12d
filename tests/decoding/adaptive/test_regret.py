"""Drafts that adapt, on traces: how much slower than the best fixed length in hindsight, and than one per phase."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from draft_traces import (
    COSTS,
    KINDS,
    LONGEST,
    RECORDED,
    Trace,
    bernoulli,
    best_fixed_s,
    drawn,
    fixed_s,
    from_hits,
    oracle_s,
    recorded,
    synthetic,
    write,
)
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.adaptive.acceptance_rates import Prior
from eagle31_hf.decoding.adaptive.costs import RoundCosts, choose_length
from eagle31_hf.decoding.adaptive.guard import LOSS
from eagle31_hf.decoding.adaptive.schedules import ConstantSchedule, HeuristicSchedule, PidSchedule

MACHINES = tuple(COSTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_close_to_the_best_in_hindsight(machine: str, kind: str) -> None:
    costs = COSTS[machine]
    spent = best = oracle = 0.0
    for seed in range(2):
        trace = synthetic(kind, 1500, seed)
        spent += write(trace, costs).seconds
        best += best_fixed_s(trace, costs)
        oracle += oracle_s(trace, costs)
    assert spent <= 1.05 * best
    assert spent <= 1.15 * oracle


@pytest.mark.parametrize("asks", [False, True], ids=["one length a round", "ends by doubt"])
@pytest.mark.parametrize("machine", MACHINES)
def test_close_to_the_best_on_recorded_drafts(machine: str, asks: bool) -> None:
    """`ends by doubt` is what the default does on a CPU, where no graph makes all drafts equally long."""
    if asks and COSTS[machine].in_buckets:
        pytest.skip("a graph does not ask for doubt")
    costs, spent, best = COSTS[machine], [], []
    for kind in RECORDED:
        spent.append(write(recorded(kind), costs, asks_confidence=asks).seconds)
        best.append(best_fixed_s(recorded(kind), costs))
        assert spent[-1] <= 1.15 * oracle_s(recorded(kind), costs), kind
    assert sum(spent) <= 1.05 * sum(best), "each text's own best length, known beforehand"
    assert spent[-1] <= 1.05 * best[-1], "from one kind of text to another"


SMALL_TARGET = RoundCosts(((1, 0.0072), (2, 0.0085), (8, 0.0087), (16, 0.0093), (32, 0.0107)), 0.0006, 0.0009, 0.0014)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.4, 0.45, 0.5, 0.6, 0.8])
@pytest.mark.parametrize("costs", [COSTS["fp32"], COSTS["bf16"], COSTS["gpu"], SMALL_TARGET])
@pytest.mark.thorough(every=4)
def test_chance_alone_begins_few_rests(costs: RoundCosts, rate: float) -> None:
    """Short texts whose drafts are right by chance: near break-even a dozen bad rounds say little of the next ones."""
    texts = [drawn(rate, 256, seed) for seed in range(40)]
    spent = sum(write(text, costs, asks_confidence=True).seconds for text in texts)
    assert spent <= 1.05 * min(sum(fixed_s(text, costs, depth) for text in texts) for depth in range(LONGEST + 1))


def test_doubt_that_is_never_right_is_overcome() -> None:
    """A drafter that doubts all and is always right is soon let draft on; one that is sure and wrong, no more."""
    humble = Trace((LONGEST,) * 600, ((0.55,) * LONGEST,) * 600)
    costs = COSTS["gpu"]
    assert write(humble, costs, asks_confidence=True).seconds <= 1.25 * best_fixed_s(humble, costs)
    boaster = Trace((0,) * 600, ((0.99,) * LONGEST,) * 600)
    assert write(boaster, costs, asks_confidence=True).seconds <= 1.05 * fixed_s(boaster, costs, 0)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_random_drafter_costs_three_percent_at_most(machine: str) -> None:
    costs, long, short = COSTS[machine], from_hits([False] * 512), from_hits([False] * 128)
    assert fixed_s(long, costs, 0) >= 0.97 * write(long, costs).seconds, "the first text"
    known = Prior(rate=0.02, weight=4.0)  # by texts before it
    assert fixed_s(short, costs, 0) >= 0.97 * write(short, costs, prior=known).seconds


@pytest.mark.parametrize("asks", [False, True], ids=["one length a round", "ends by doubt"])
@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_never_right_is_not_tried_again(machine: str, asks: bool) -> None:
    """It is judged by what it would have drafted, and drafts in no round behind its first few."""
    nothing_right = Trace((0,) * 400, ((0.0,) * LONGEST,) * 400)  # nor is the drafter sure of anything
    table = COSTS[machine].rounds(LONGEST)
    drafts = [each for each in write(nothing_right, COSTS[machine], asks_confidence=asks).rounds if each[1]]
    assert [at for at, _ in drafts] == list(range(len(drafts)))
    assert len(drafts) >= 2
    assert sum(table.break_even_tokens(depth) - 1.0 for _, depth in drafts[:-1]) < 4 * LOSS, "before the last of them"


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
        assert write(trace, costs, make).seconds <= 1.03 * fixed_s(trace, costs, 0), kind


@given(hits=st.lists(st.booleans(), min_size=50, max_size=300), machine=st.sampled_from(MACHINES))
def test_no_text_makes_it_much_slower_than_plain(hits: list[bool], machine: str) -> None:
    """Whatever the drafter gets right, the loss is a share of the text and a few tokens at the beginning."""
    costs, trace = COSTS[machine], from_hits(hits)
    plain_s = fixed_s(trace, costs, 0)
    assert write(trace, costs).seconds <= 1.06 * plain_s + 5 * costs.rounds(1).plain_s


@pytest.mark.parametrize("machine", MACHINES)
def test_comes_back_within_64_tokens(machine: str) -> None:
    """Good, then a stretch in which nothing is right, then good again: the speed of before is there 64 tokens later."""
    costs = COSTS[machine]
    away, back, end = 400, 1000, 2000
    before = after = 0.0
    for seed in range(4):
        trace = bernoulli(lambda t: 0.0 if away <= t < back else 0.9, end, seed)
        written = write(trace, costs)
        before += speed(written, costs, 0, away)
        after += speed(written, costs, back + 64, end)
        assert any(what == "resume" for what, _ in written.events)
    assert after >= 0.9 * before


@given(
    rate=st.floats(0.3, 0.99),
    machine=st.sampled_from(MACHINES),
    first=st.integers(1, LONGEST - 1),
    more=st.integers(1, LONGEST - 1),
)
def test_verifying_a_draft_in_two_parts_never_pays(rate: float, machine: str, first: int, more: int) -> None:
    """Why a chain is verified whole: a shorter one is always faster than the first part alone and then the rest.

    Both verify the same widths one after the other; but of the short one's rounds the second drafts anew only if the
    first was accepted, where a long draft has been made in vain.
    """
    costs, depth = COSTS[machine], min(first + more, LONGEST)
    if depth <= first:
        return
    reach = list(accumulate([rate] * LONGEST, mul))
    drafted_s = costs.absorb_s + (depth - 1) * costs.drafter_step_s
    in_parts_s = drafted_s + costs.round_s + costs.target_s(first + 1) + reach[first] * costs.target_s(depth - first)
    whole = choose_length(costs.rounds(LONGEST), reach, range(1, LONGEST + 1))
    assert (1.0 + sum(reach[:depth])) / in_parts_s <= whole.speedup / costs.rounds(LONGEST).plain_s


def speed(written, costs, start: int, end: int) -> float:
    """Tokens per modelled second between two positions."""
    table = costs.rounds(LONGEST)
    return (end - start) / sum(table.speculative_s[depth] for at, depth in written.rounds if start <= at < end)


def test_every_change_is_told_with_its_reason() -> None:
    events = write(synthetic("alternating"), COSTS["fp32"]).events
    assert {"rest", "resume", "length"} <= {what for what, _ in events}
    assert all("%" in why for _, why in events)
