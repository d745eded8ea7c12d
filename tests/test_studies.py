"""Studies of examples/studies: rounds by hand and those of `generate`, what is measured, that another text is seen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_mtp
import torch
import two_commits
from policy_replay import MACHINES, DraftTrace, Machine, compare, planned, read_kept, replay
from policy_texts import as_row

from eagle31_hf.drafting.plan import REST, DraftPlan, DraftPolicy
from eagle31_hf.drafting.shape import DraftShape

ROOT = Path(__file__).parents[1]
MACHINE = Machine(((1, 1.0), (2, 1.25), (3, 1.25), (4, 1.5)), drafter_step_s=0.125, absorb_s=0.25)


class Told(DraftPolicy):
    """A policy that plays its plans one after the other, and keeps what it is told."""

    def __init__(self, plans: list[DraftPlan]):
        self.plans, self.told = plans, []
        self.seen: list[int] = []

    def next_draft(self, rows, texts, remaining) -> DraftPlan:
        self.seen.append(len(texts.new[0]))
        return self.plans[len(self.told)]

    def record(self, plan, depth, rows, accepted, seconds) -> None:
        self.told.append((depth, *accepted))


def test_rounds_and_seconds_by_hand() -> None:
    chain = DraftPlan(DraftShape(3))
    lookup = DraftPlan(DraftShape(2), tokens=((15, 99),))
    policy = Told([chain, REST, lookup, chain, chain])
    trace = DraftTrace((2, 0, 0, 9, 9, 0, 9, 0, 9, 9), prompt=(7, 8), written=tuple(range(11, 21)))
    found = replay(policy, trace, MACHINE)
    # Written: 3 tokens by a chain that was right twice, 1 at rest, 2 by a lookup right once, 4 by a whole chain.
    assert found.rounds == [(0, 3, 2, False), (3, 0, 0, False), (4, 2, 1, True), (6, 3, 3, False)]
    assert found.counts == (4, 8, 6, 1, 1, found.seconds)
    assert found.seconds == 2.0 + 1.0 + 1.25 + 2.0
    assert policy.told == [(3, 2), (0, 0), (2, 1), (3, 3)]
    assert policy.seen == [0, 3, 4, 6]


def test_a_draft_waits_for_the_drafter_to_read_after_a_rest_alone() -> None:
    one, lookup = DraftPlan(DraftShape(1)), DraftPlan(DraftShape(1), tokens=((99,),))
    trace = DraftTrace((0,) * 4, written=(1, 2, 3, 4))
    rested = replay(Told([REST, one, one]), trace, MACHINE)
    assert rested.seconds == 1.0 + (0.25 + 1.5) + 1.5 + 1.0
    looked_up = replay(Told([one, lookup, one, one]), trace, MACHINE)
    assert looked_up.seconds == 1.5 + 1.25 + 1.5 + 1.0


def test_doubt_ends_a_chain() -> None:
    trace = DraftTrace((3, 0), sure=((0.5, 0.5, 0.5), (0.9, 0.9, 0.9)))
    assert trace.drafted(0, DraftShape(3, min_confidence=0.3)) == 2
    assert trace.drafted(0, DraftShape(3)) == trace.drafted(1, DraftShape(3, min_confidence=0.3)) == 3


def test_kept_texts_hold_their_repetitions_and_nothing_else() -> None:
    chains = SimpleNamespace(kept=torch.tensor([1, 0]), sure=torch.tensor([[0.951, 0.004, 0.9], [0.5, 0.001, 0.2]]))
    row = as_row([700, 12, 700, 12, 5], 3, chains)
    assert (row["prompt"], row["written"]) == ([0, 1, 0], [1, 2])
    assert (row["right"], row["sure"]) == ([1, 0], [[95, 0], [50, 0]]), "in percent, to where no draft goes on"


def test_the_kept_counts_are_of_texts_of_both_drafters() -> None:
    texts, counts = read_kept()
    assert len(texts) == 2 * 112
    assert {text.kind for text in texts} == {"domain", "other", "code", "copy"}
    assert all(text.prompt and len(text.written) == len(text) for text in texts)
    assert counts.keys() == MACHINES.keys()
    for rows in counts.values():
        written = [row.rounds + row.accepted for row in rows]
        assert written == [len(text) for text in texts], "one each round beside the accepted"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_planner_is_as_fast_as_the_kept_default(machine: str) -> None:
    """It knows bytes at first, and then the seconds of its own rounds; texts are those of one process."""
    kept, counts = read_kept()
    texts, before = zip(
        *[(text, row.seconds) for text, row in zip(kept, counts[machine], strict=True) if text.drafter == "trained"],
        strict=True,
    )
    found = planned(texts, MACHINES[machine])
    assert compare(found, before)[0] >= 1.0
    for kind in ("domain", "other", "code", "copy"):
        chosen = [place for place, text in enumerate(texts) if text.kind == kind]
        assert compare([found[place] for place in chosen], [before[place] for place in chosen])[0] >= 0.98, kind


@pytest.mark.parametrize("name", MACHINES)
def test_an_untrained_drafter_costs_the_planner_little(name: str) -> None:
    machine = MACHINES[name]
    texts = [text for text in read_kept()[0] if text.drafter == "untrained"][::2]
    assert compare(planned(texts, machine), [text.plain_s(machine) for text in texts])[0] >= 0.95
    drawn = [text for text in texts if text.temperature > 0]
    found = [planned([text], machine)[0] for text in drawn]
    assert compare(found, [text.plain_s(machine) for text in drawn])[0] >= 0.94, "of processes that have timed nothing"


@pytest.mark.slow
def test_its_passes_are_those_of_the_slow_reference(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats, kept = tmp_path / "chats.jsonl", tmp_path / "record.json"
    chats.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(80)))
    options = ["--out", tmp_path / "small", "--minutes", 0.02, "--head-minutes", 0.02, "--prompts", 1,
               "--new-tokens", 12, "--drafts", 1, 3, "--json", kept]  # fmt: skip
    for draft_vocab in (None, 2048):
        rows = [] if draft_vocab is None else ["--draft-vocab", draft_vocab]
        small_mtp.main([str(each) for each in (chats, "--held-out", chats, *options, *rows)])
        record = json.loads(kept.read_text())
        assert record["draft_rows"] == (draft_vocab or 8192)
        assert all(each["equal_texts"] == 1 for each in record["by_drafts"])
        assert record["reference"]["same_pass_by_pass"] == record["reference"]["of"] == 1


class Version:
    """A version that writes what it is told, in so many seconds."""

    def __init__(self, text: list[int], seconds: float):
        self.text, self.seconds, self.asked = text, seconds, []

    def ask(self, **request):
        self.asked.append((request["prompt"], request["seed"]))
        return {"tokens": self.text, "seconds": self.seconds}


OPTIONS = two_commits.argparse.Namespace(turns=3, tokens=4, prompts=2)


def test_speeds_ratio_and_spread_are_over_turns() -> None:
    before, after = Version([1, 2, 3, 4], 2.0), Version([1, 2, 3, 4], 1.0)
    found = two_commits.measure("eager", 0.0, [before, after], OPTIONS)
    assert (found["tok_per_s"], found["ratio"], found["ratio_spread"]) == ([2.0, 4.0], 2.0, [2.0, 2.0])
    assert found["spread"] == [[2.0, 2.0], [4.0, 4.0]]
    assert found["different_texts"] == 0
    assert before.asked == after.asked
    assert len(before.asked) == 4 * 2, "the first writing warms up"


def test_every_text_that_differs_is_counted() -> None:
    found = two_commits.measure("eager", 1.0, [Version([1, 2], 1.0), Version([1, 3], 1.0)], OPTIONS)
    assert found["different_texts"] == 4 * 2


def test_a_version_that_is_neither_folder_nor_commit_is_named() -> None:
    with pytest.raises(SystemExit, match=r"^got 'no-such-commit', which is no folder .* and no commit"):
        two_commits.main(["no-such-commit", "."])


@pytest.mark.slow
def test_two_folders_write_the_same_texts(tmp_path: Path) -> None:
    """Each by its own sources: the second is a link elsewhere."""
    other = tmp_path / "other"
    (other / "src").mkdir(parents=True)
    (other / "src" / "eagle31_hf").symlink_to(ROOT / "src" / "eagle31_hf")
    record = tmp_path / "found.json"
    told = ["--accelerations", "eager", "--turns", "1", "--tokens", "8", "--prompts", "1", "--json", str(record)]
    assert two_commits.main([str(ROOT), str(other), *told]) == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["versions"] == [str(ROOT), str(other)]
    assert [method["method"] for method in found["methods"]] == ["eager greedy", "eager temperature 1"]
    assert all(method["different_texts"] == 0 and min(method["tok_per_s"]) > 0 for method in found["methods"])
