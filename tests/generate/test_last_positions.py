"""Targets whose positions end (GPT-2, OPT, GPT-J, ...): texts up to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from families import ENDING, LAST
from helpers import (
    assert_same_text,
    left_padded,
    random_drafter,
    random_target,
    use_fixed_shapes_only,
)
from matrix import pairwise

SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 12}}


def pair(family: str) -> tuple[Any, Any]:
    model = random_target(ENDING[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 3])


@pytest.mark.parametrize(
    ("family", "rows", "shape", "do_sample"), pairwise([*ENDING], (1, 2, 3), [*SHAPES], (False, True))
)
def test_a_text_may_reach_the_last_position(family: str, rows: int, shape: str, do_sample: bool) -> None:
    """Rows get there one after the other: those that have little left are drafted as far as the others."""
    model, drafter = pair(family)
    inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
    settings = {"num_assistant_tokens": 6, **SHAPES[shape]}
    for oracle in range(3):
        assert_same_text(
            model, drafter, inputs, oracle=oracle, settings=settings, do_sample=do_sample, max_new_tokens=LAST - 9
        )
        assert drafter.stats.reason == ""


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_graphs_keep_to_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs look deeper than a text's end."""
    use_fixed_shapes_only(monkeypatch)
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
        settings = {"num_assistant_tokens": 6, "acceleration": "compile", "num_assistant_tokens_schedule": "planned"}
        assert_same_text(model, drafter, inputs, oracle=1, settings=settings, max_new_tokens=LAST - 9)
        assert drafter.stats.fallbacks == []


def test_what_may_pass_it_is_left_to_plain_decoding() -> None:
    """It raises where the text gets there, and writes where the text ends before."""
    model, drafter = pair("gpt2")
    inputs = left_padded([list(range(5, 14))])
    free = model.generate(**inputs, do_sample=False, max_new_tokens=LAST - 9)[0].tolist()
    with pytest.raises(IndexError):
        model.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=60)
    assert "the target has 40 positions" in drafter.stats.reason
    assert_same_text(model, drafter, inputs, loop="plain", eos_token_id=free[-2], max_new_tokens=60)
