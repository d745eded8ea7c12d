"""When drafting rests: counted by hand, and in generations whose drafts are never right or always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.control import LONGEST_REST, PATIENCE, SHORTEST_REST, TRIAL, Patience
from helpers import drafter_of, left_padded, oracle_drafts, prompts_for, target_of, wishes


def rests(accepted: list[list[int]]) -> list[bool]:
    """Which rounds draft nothing; those are given nothing to accept, whatever the list says."""
    patience, resting = Patience(), []
    for rows in accepted:
        resting.append(patience.is_at_end)
        patience.record_round([0] * len(rows) if resting[-1] else rows)
    return resting


def test_rests_double_until_a_draft_is_right() -> None:
    def drafts(count: int) -> list[bool]:
        return [False] * count

    def rest(count: int) -> list[bool]:
        return [True] * count

    in_vain = rests([[0]] * 400)
    expected = drafts(PATIENCE) + rest(SHORTEST_REST)
    length = SHORTEST_REST
    while len(expected) < 400:
        length = min(2 * length, LONGEST_REST)
        expected += drafts(TRIAL) + rest(length)
    assert in_vain == expected[:400]
    assert max(len(run) for run in "".join("x" if r else " " for r in in_vain).split()) == LONGEST_REST


def test_one_right_draft_in_a_trial_ends_it() -> None:
    trial = PATIENCE + SHORTEST_REST
    accepted = [[0]] * trial + [[0], [1]] + [[0]] * (PATIENCE + SHORTEST_REST)
    assert rests(accepted)[trial:] == [False] * (2 + PATIENCE) + [True] * SHORTEST_REST


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=80))
def test_a_row_that_accepts_keeps_all_drafting(accepted: list[list[int]]) -> None:
    often = [rows if index % (PATIENCE - 1) else [0, 1] for index, rows in enumerate(accepted)]
    assert not any(rests(often))


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
        with wishes(drafter_of("llama"), **SHAPES[shape]) as eagle, oracle_drafts(drafts, length, right=3):
            assert torch.equal(target.generate(**inputs, assistant_model=eagle, **settings), plain)
        assert eagle.stats is not None
        if right:
            assert eagle.stats.rests == 0
        else:
            assert eagle.stats.passes - eagle.stats.rests <= PATIENCE + 2 * TRIAL + 1, "the last token drafts nothing"
            assert "passes without drafts" in str(eagle.stats)
