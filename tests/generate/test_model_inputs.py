"""Whatever a call hands to the model beside tokens arrives there: with the drafter the text is plain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.errors import IncompatibleTargetError
from helpers import CONFIGS, left_padded, random_drafter, random_prompts, random_target

CHAIN: dict[str, Any] = {"num_assistant_tokens": 4}
TREE: dict[str, Any] = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9}
NEW = 10


def greedy(model: Any, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW, pad_token_id=0, **kwargs)


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
    own = greedy(model, {**inputs, "position_ids": positions})
    assert torch.equal(greedy(model, {**inputs, "position_ids": positions}, assistant_model=drafter), own)
    assert drafter.stats.loop == "plain"
    assert "position_ids" in drafter.stats.reason
    assert torch.equal(
        greedy(model, {**inputs, "position_ids": straight}, assistant_model=drafter), greedy(model, inputs)
    )
    assert drafter.stats.loop == "own", drafter.stats.reason


def test_an_invented_keyword_gets_plains_answer() -> None:
    model = random_target(CONFIGS["llama"]())
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    inputs = {**left_padded(random_prompts(1)), "pixel_value": torch.zeros(1)}
    with pytest.raises(ValueError, match="pixel_value") as plain:
        greedy(model, inputs)
    with pytest.raises(ValueError, match="pixel_value") as ours:
        greedy(model, inputs, assistant_model=drafter)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_target_of_another_precision_than_when_attached(before: str, after: str, settings: dict[str, Any]) -> None:
    model = random_target(CONFIGS["llama"](), seed=6).to(getattr(torch, before))
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    model.to(getattr(torch, after))
    inputs = left_padded(random_prompts(3, seed=2))
    assert torch.equal(greedy(model, inputs, assistant_model=drafter), greedy(model, inputs))
    assert drafter.stats.loop == "own", drafter.stats.reason


@pytest.mark.parametrize("size", [120, 60])
def test_a_vocabulary_resized_after_attaching_is_named(size: int) -> None:
    model = random_target(CONFIGS["llama"](), seed=7)
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    model.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(IncompatibleTargetError, match="attach"):
        greedy(model, left_padded(random_prompts(1, vocabulary=50)), assistant_model=drafter)
