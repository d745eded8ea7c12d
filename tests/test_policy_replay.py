"""Policies on known texts: rounds by hand, and those of `generate`."""

from __future__ import annotations

import pytest
from policy_replay import (
    MACHINES,
    DraftTrace,
    KeptText,
    RoundSeconds,
    compare,
    count,
    plain_s,
    planner_of,
    read_kept,
    replay,
)
from policy_texts import as_row

from eagle31_hf.drafting.plan import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.drafting.shape import DraftShape

NEW_TOKENS = 48
TABLE = RoundSeconds(speculative_s=(1.0, 1.5, 1.75, 2.0), lookup_s=(1.0, 1.25, 1.25, 1.5), reading_s=0.25)


class Told(DraftPolicy):
    """A policy that plays its plans one after the other, and keeps what it is told."""

    def __init__(self, plans: list[DraftPlan]):
        self.plans, self.told = plans, []
        self.seen: list[int] = []

    def next_draft(self, state: RoundState) -> DraftPlan:
        self.seen.append(len(state.sequences.new[0]))
        return self.plans[len(self.told)]

    def record(self, stats: RoundStats) -> None:
        self.told.append((stats.depth, *stats.accepted))


def test_rounds_and_seconds_by_hand() -> None:
    chain = DraftPlan(DraftShape(3))
    lookup = DraftPlan(DraftShape(2), tokens=((15, 99),))
    policy = Told([chain, DraftPlan.skip(), lookup, chain, chain])
    trace = DraftTrace((2, 0, 0, 9, 9, 0, 9, 0, 9, 9), prompt=(7, 8), written=tuple(range(11, 21)))
    found = replay(policy, trace, TABLE, DraftShape(3))
    # Written: 3 tokens by a chain that was right twice, 1 at rest, 2 by a lookup right once, 4 by a whole chain.
    assert [(done.at, done.drafted, done.accepted) for done in found.rounds] == [
        (0, 3, 2),
        (3, 0, 0),
        (4, 2, 1),
        (6, 3, 3),
    ]
    assert [done.looked_up for done in found.rounds] == [False, False, True, False]
    assert found.seconds == 2.0 + 1.0 + 1.25 + 2.0
    assert policy.told == [(3, 2), (0, 0), (2, 1), (3, 3)]
    assert policy.seen == [0, 3, 4, 6]


def test_a_draft_after_a_rest_waits_for_the_drafter_to_read() -> None:
    one = DraftPlan(DraftShape(1))
    rested = replay(Told([DraftPlan.skip(), one, one]), DraftTrace((0,) * 4), TABLE, DraftShape(3))
    assert rested.seconds == 1.0 + (0.25 + 1.5) + 1.5 + 1.0


def test_a_draft_after_a_lookup_waits_for_nothing() -> None:
    one, lookup = DraftPlan(DraftShape(1)), DraftPlan(DraftShape(1), tokens=((99,),))
    found = replay(Told([one, lookup, one, one]), DraftTrace((0,) * 4, written=(1, 2, 3, 4)), TABLE, DraftShape(3))
    assert found.seconds == 1.5 + 1.25 + 1.5 + 1.0


def test_doubt_ends_a_chain() -> None:
    trace = DraftTrace((3, 0), sure=((0.5, 0.5, 0.5), (0.9, 0.9, 0.9)))
    assert trace.drafted(0, DraftShape(3, min_confidence=0.3)) == 2
    assert trace.drafted(0, DraftShape(3)) == trace.drafted(1, DraftShape(3, min_confidence=0.3)) == 3


def test_kept_texts_hold_their_repetitions_and_nothing_else() -> None:
    trace = DraftTrace((1, 0), ((0.951, 0.004, 0.9), (0.5,)), prompt=(700, 12, 700), written=(12, 5))
    row = as_row(KeptText("chat", 0.0, "trained", trace))
    assert (row["prompt"], row["written"]) == ([0, 1, 0], [1, 2])
    assert (row["right"], row["sure"]) == ((1, 0), [[95, 0], [50]]), "in percent, to where no draft goes on"


def test_the_kept_counts_are_of_texts_of_both_drafters() -> None:
    kept = read_kept()
    assert len(kept.texts) == 2 * 112
    assert {text.kind for text in kept.texts} == {"domain", "other", "code", "copy"}
    assert {len(text.trace.prompt) > 0 and len(text.trace.written) == len(text.trace) for text in kept.texts} == {True}
    for by_machine in kept.counts.values():
        assert by_machine.keys() == MACHINES.keys()
        for rows in by_machine.values():
            written = [row.rounds + row.accepted for row in rows]
            assert written == [len(text.trace) for text in kept.texts], "one each round beside the accepted"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_planner_is_as_fast_as_the_kept_default(machine: str) -> None:
    """It knows bytes at first, and then the seconds of its own rounds; texts are those of one process."""
    texts = [(at, text) for at, text in enumerate(read_kept().texts) if text.drafter == "trained"]
    found = count(planner_of(MACHINES[machine]), [text for _, text in texts], MACHINES[machine])
    kept = read_kept().counts["default"][machine]
    assert compare(found, [kept[at].seconds for at, _ in texts])["ratio"] >= 1.0
    for kind in ("domain", "other", "code", "copy"):
        chosen = [place for place, (_, text) in enumerate(texts) if text.kind == kind]
        before = [kept[texts[place][0]].seconds for place in chosen]
        assert compare([found[place] for place in chosen], before)["ratio"] >= 0.98, kind


@pytest.mark.parametrize("machine", MACHINES)
def test_an_untrained_drafter_costs_the_planner_little(machine: str) -> None:
    texts = [text for text in read_kept().texts if text.drafter == "untrained"][::2]
    plain = [plain_s(text, MACHINES[machine]) for text in texts]
    assert compare(count(planner_of(MACHINES[machine]), texts, MACHINES[machine]), plain)["ratio"] >= 0.95
    drawn = [text for text in texts if text.temperature > 0]
    found = [count(planner_of(MACHINES[machine]), [text], MACHINES[machine])[0] for text in drawn]
    first = compare(found, [plain_s(text, MACHINES[machine]) for text in drawn])["ratio"]
    assert first >= 0.94, "of processes that have timed nothing"


def test_a_policy_that_never_drafts_has_the_speed_of_plain_decoding() -> None:
    text = read_kept().texts[0]
    never = Told([DraftPlan.skip()] * len(text.trace))
    for machine in MACHINES.values():
        (found,) = count(lambda _text, _machine, policy=never: (policy, DraftShape(12)), [text], machine)
        assert found.seconds == pytest.approx(plain_s(text, machine))
        never.told.clear()
