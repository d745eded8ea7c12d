"""Whatever a call hands to the model beside tokens arrives there: with the drafter the text is plain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle31_hf.errors import IncompatibleTargetError
from helpers import CONFIGS, assert_same_text, configured, left_padded, random_drafter, random_prompts, random_target

CHAIN: dict[str, Any] = {"num_assistant_tokens": 4}
TREE: dict[str, Any] = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}


@pytest.mark.parametrize("given", ["zeros", "reversed", "repeated", "shifted"])
def test_positions_of_ones_own_are_plains(given: str) -> None:
    model = random_target(CONFIGS["llama"]())
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    inputs = left_padded(random_prompts(1, seed=3))
    length = inputs["input_ids"].shape[1]
    straight = torch.arange(length)[None]
    repeated = straight.clone()
    repeated[0, length // 2 :] -= 1
    positions = {
        "zeros": torch.zeros_like(straight),
        "reversed": straight.flip(1),
        "repeated": repeated,
        "shifted": straight + 7,
    }[given]
    assert_same_text(model, drafter, {**inputs, "position_ids": positions}, loop="plain", **GREEDY)
    assert "position_ids" in drafter.stats.reason
    assert_same_text(model, drafter, {**inputs, "position_ids": straight}, **GREEDY)


def test_an_invented_keyword_gets_plains_answer() -> None:
    model = random_target(CONFIGS["llama"]())
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    inputs = {**left_padded(random_prompts(1)), "pixel_value": torch.zeros(1)}
    said = []
    for assistant in (None, drafter):
        with pytest.raises(ValueError, match="pixel_value") as error:
            model.generate(**inputs, **GREEDY, assistant_model=assistant)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_target_of_another_precision_than_when_attached(before: str, after: str, settings: dict[str, Any]) -> None:
    model = random_target(CONFIGS["llama"](), seed=6).to(getattr(torch, before))
    with configured(random_drafter(model, aux_layers=[1, 2, 4]), **settings) as drafter:
        model.to(getattr(torch, after))
        assert_same_text(model, drafter, left_padded(random_prompts(3, seed=2)), **GREEDY)


@pytest.mark.parametrize("size", [120, 60])
def test_a_vocabulary_resized_after_attaching_is_named(size: int) -> None:
    model = random_target(CONFIGS["llama"](), seed=7)
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    model.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(IncompatibleTargetError, match="attach"):
        model.generate(**left_padded(random_prompts(1, vocabulary=50)), **GREEDY, assistant_model=drafter)
