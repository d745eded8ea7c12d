"""The contract for every family that a loop may meet: plain's text, or a refusal that says why.

Targets are tiny and random. What a target sees (a picture) must change its text, or nothing would be tested.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from families import IMAGE, SEEING_FAMILIES, TEXT_FAMILIES
from helpers import assert_same_text, left_padded, random_drafter, random_prompts, random_target

CHAIN: dict[str, Any] = {"num_assistant_tokens": 4}
TREE: dict[str, Any] = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": TREE,
    "tree compiled": {**TREE, "acceleration": "compile"},
}
NO_TREES = ("bloom", "gpt_neo")
"""Families whose layers take no mask of one's own: the self-test finds out, and another loop serves them."""


@cache
def pair(family: str) -> tuple[Any, Any]:
    model = SEEING_FAMILIES[family].model() if family in SEEING_FAMILIES else random_target(TEXT_FAMILIES[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 4])


def assert_plain(family: str, inputs: dict[str, Any], shape: str, **kwargs: Any) -> Tensor:
    greedy = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    rows = len(inputs["input_ids"])
    return assert_same_text(*pair(family), inputs, oracle=rows, settings=SHAPES[shape], **greedy, **kwargs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_text_is_plains(family: str, shape: str) -> None:
    """Alone and in a ragged batch of three, across windows of eight."""
    for rows in (1, 3):
        inputs = left_padded(random_prompts(rows, seed=rows, longest=20))
        assert_plain(family, inputs, shape, loop="plain" if family in NO_TREES else "own")
        assert family not in NO_TREES or "self-test" in pair(family)[1].stats.reason


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_picture_changes_the_text_as_it_does_without_a_drafter(family: str, shape: str) -> None:
    one, other = (assert_plain(family, SEEING_FAMILIES[family].inputs(picture), shape) for picture in (1, 2))
    assert not torch.equal(one, other), "or nothing is tested"


@pytest.mark.contract
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_pictures_in_a_ragged_batch_of_three(family: str, shape: str) -> None:
    text = assert_plain(family, SEEING_FAMILIES[family].inputs(1, rows=3, padding=[0, 5, 2]), shape)
    assert not torch.equal(text[0], text[1]), "each row sees its own picture"


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_model_that_sees_is_drafted_for_without_pictures(family: str) -> None:
    for rows in (1, 3):
        inputs = left_padded(random_prompts(rows, vocabulary=80, seed=rows))
        assert int(inputs["input_ids"].max()) < IMAGE
        assert_plain(family, inputs, "chain")
