"""When drafting pauses: counted by hand, and in generations whose drafts are never right or always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.draft_backoff import LONGEST_PAUSE, RETRY_ROUNDS, ROUNDS_IN_VAIN, SHORTEST_PAUSE, DraftBackoff
from eagle31_hf.drafting.plan import RoundState, RoundStats
from eagle31_hf.trees.shape import DraftShape
from helpers import configured, drafter_of, left_padded, oracle_drafts, prompts_for, target_of

LARGEST = DraftShape(depth=3)


def skipped(accepted: list[list[int]]) -> list[bool]:
    """Which rounds draft nothing; those are given nothing to accept, whatever the list says."""
    backoff, skips = DraftBackoff(), []
    for counts in accepted:
        rows = range(len(counts))
        plan = backoff.next_draft(RoundState(LARGEST, rows, sequences=None, remaining_tokens=100))
        assert plan.shape == (DraftShape(depth=0) if plan.skips else LARGEST)
        skips.append(plan.skips)
        told = [0] * len(counts) if plan.skips else counts
        backoff.record(RoundStats(plan, plan.shape.depth, plan.shape.depth, tuple(rows), tuple(told)))
    return skips


def test_pauses_double_until_a_draft_is_right() -> None:
    def drafts(count: int) -> list[bool]:
        return [False] * count

    def pause(count: int) -> list[bool]:
        return [True] * count

    in_vain = skipped([[0]] * 400)
    expected = drafts(ROUNDS_IN_VAIN) + pause(SHORTEST_PAUSE)
    length = SHORTEST_PAUSE
    while len(expected) < 400:
        length = min(2 * length, LONGEST_PAUSE)
        expected += drafts(RETRY_ROUNDS) + pause(length)
    assert in_vain == expected[:400]
    assert max(len(run) for run in "".join("x" if r else " " for r in in_vain).split()) == LONGEST_PAUSE


def test_one_right_draft_in_a_retry_ends_it() -> None:
    retry = ROUNDS_IN_VAIN + SHORTEST_PAUSE
    accepted = [[0]] * retry + [[0], [1]] + [[0]] * (ROUNDS_IN_VAIN + SHORTEST_PAUSE)
    assert skipped(accepted)[retry:] == [False] * (2 + ROUNDS_IN_VAIN) + [True] * SHORTEST_PAUSE


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=80))
def test_a_row_that_accepts_keeps_all_drafting(accepted: list[list[int]]) -> None:
    often = [rows if index % (ROUNDS_IN_VAIN - 1) else [0, 1] for index, rows in enumerate(accepted)]
    assert not any(skipped(often))


SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 3},
    "tree": {"num_assistant_tokens": 3, "draft_top_k": 2, "draft_tree_size": 8},
}


@pytest.mark.contract
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_drafter_that_is_never_right_is_hardly_asked(shape: str, rows: int) -> None:
    inputs = left_padded(prompts_for("llama", rows))
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    target, length = target_of("llama"), inputs["input_ids"].shape[1]
    plain = target.generate(**inputs, **settings)
    wrong = (plain + 1) % 96
    for drafts, right in ((wrong, False), (plain, True)):
        with configured(drafter_of("llama"), **SHAPES[shape]) as eagle, oracle_drafts(drafts, length, right=3):
            assert torch.equal(target.generate(**inputs, assistant_model=eagle, **settings), plain)
        assert eagle.stats is not None
        if right:
            assert eagle.stats.skipped_rounds == 0
        else:
            drafting = eagle.stats.passes - eagle.stats.skipped_rounds
            assert drafting <= ROUNDS_IN_VAIN + 2 * RETRY_ROUNDS + 1, "the last token drafts nothing"
            assert "passes without drafts" in str(eagle.stats)
