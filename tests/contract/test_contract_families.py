"""The contract for every family that a loop may meet: plain's text, or a refusal that says why.

Targets are tiny and random. What a target sees (a picture) must change its text, or nothing would be tested.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from families import IMAGE, SEEING_FAMILIES, TEXT_FAMILIES
from helpers import (
    configured,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_prompts,
    random_target,
)

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
def pair(family: str) -> tuple[Any, Eagle31Drafter]:
    model = SEEING_FAMILIES[family].model() if family in SEEING_FAMILIES else random_target(TEXT_FAMILIES[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 4])


def greedy(model: Any, inputs: dict[str, Any], new_tokens: int = 14, **kwargs: Any) -> Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **kwargs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_text_is_plains(family: str, shape: str) -> None:
    """Alone and in a ragged batch of three, across windows of eight."""
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded(random_prompts(rows, seed=rows, longest=20))
        plain = greedy(model, inputs)
        with configured(drafter, **SHAPES[shape]), oracle_drafts(plain, inputs["input_ids"].shape[1], seed=rows):
            assert torch.equal(greedy(model, inputs, assistant_model=drafter), plain)
        assert drafter.stats is not None
        if family in NO_TREES:
            assert drafter.stats.loop == "plain"
            assert "self-test" in drafter.stats.reason
        else:
            assert drafter.stats.loop == "own", drafter.stats.reason
            assert drafter.stats.accepted > 0, "nothing was tried"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_picture_changes_the_text_as_it_does_without_a_drafter(family: str, shape: str) -> None:
    model, drafter = pair(family)
    texts = []
    for picture in (1, 2):
        inputs = SEEING_FAMILIES[family].inputs(picture)
        plain = greedy(model, inputs)
        with configured(drafter, **SHAPES[shape]), oracle_drafts(plain, inputs["input_ids"].shape[1], seed=picture):
            assert torch.equal(greedy(model, inputs, assistant_model=drafter), plain)
        assert drafter.stats is not None
        assert drafter.stats.loop == "own", drafter.stats.reason
        assert drafter.stats.accepted > 0, "nothing was tried"
        texts.append(plain)
    assert not torch.equal(*texts), "or nothing is tested"


@pytest.mark.contract
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_pictures_in_a_ragged_batch_of_three(family: str, shape: str) -> None:
    model, drafter = pair(family)
    inputs = SEEING_FAMILIES[family].inputs(1, rows=3, padding=[0, 5, 2])
    plain = greedy(model, inputs)
    with configured(drafter, **SHAPES[shape]), oracle_drafts(plain, inputs["input_ids"].shape[1], seed=3):
        assert torch.equal(greedy(model, inputs, assistant_model=drafter), plain)
    assert drafter.stats is not None
    assert drafter.stats.loop == "own", drafter.stats.reason
    assert drafter.stats.accepted > 0, "nothing was tried"
    assert not torch.equal(plain[0], plain[1]), "each row sees its own picture"


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_model_that_sees_is_drafted_for_without_pictures(family: str) -> None:
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded(random_prompts(rows, vocabulary=80, seed=rows))
        assert int(inputs["input_ids"].max()) < IMAGE
        assert torch.equal(greedy(model, inputs, assistant_model=drafter), greedy(model, inputs))
        assert drafter.stats is not None
        assert drafter.stats.loop == "own", drafter.stats.reason
