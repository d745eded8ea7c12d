"""The door to `generate`: nothing stays broken behind it, and calls that are none of ours are left alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from greedy_calls import greedy, one

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path
from eagle31_hf.generate import hooks
from helpers import (
    CONFIGS,
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    held_out_prompts,
    left_padded,
    prompts_for,
    random_target,
    target_of,
)

# --- errors leave everything usable -----------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["first token", "third block", "forward"])
def test_interrupted_generation_leaves_everything_usable(where: str, error: type[BaseException]) -> None:
    drafter, calls = drafter_of("gemma3"), itertools.count(1)

    def interrupt(*_: Any) -> None:
        if where == "forward" and next(calls) == 4:
            raise error

    handle = target_of("gemma3").model.layers[2].register_forward_pre_hook(interrupt)
    shown = Shown(error, {"first token": 1, "third block": 3}.get(where, 100))
    with pytest.raises(error):
        greedy("gemma3", one(), assistant_model=drafter, streamer=shown)
    handle.remove()
    assert not drafter.binding.taps.are_open
    assert not any(drafter.binding.taps._caught.values())
    assert_same_text(target_of("gemma3"), drafter, one())


# --- others are left alone --------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_other_ways_to_generate_are_untouched() -> None:
    plain = greedy("llama", one())
    assert torch.equal(greedy("llama", one(), prompt_lookup_num_tokens=3), plain)
    assistant = random_target(CONFIGS["llama"](), seed=4)
    assert torch.equal(greedy("llama", one(), assistant_model=assistant), plain)
    with pytest.raises(ValueError, match="num_return_sequences"):
        greedy("llama", one(), assistant_model=assistant, do_sample=True, num_return_sequences=2)


def test_installing_twice_wraps_once() -> None:
    wrapped = hf.GenerationMixin.generate, hf.GenerationMixin._sample
    hooks.install()
    assert (hf.GenerationMixin.generate, hf.GenerationMixin._sample) == wrapped


def test_generate_leaves_its_arguments_alone() -> None:
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    inputs = left_padded(prompts_for("llama", 3))
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target_of("llama").generate(**inputs, generation_config=config, assistant_model=drafter_of("llama"))
    assert config.to_dict() == before
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert target_of("llama").generation_config.num_assistant_tokens in (None, 20)


# --- the demo drafter -------------------------------------------------------------------------------------------------

FIGURES = {
    ("embedded", "gsm8k"): (4.431, (0.87, 0.77, 0.69, 0.63, 0.59)),
    ("embedded", "sgd"): (3.928, (0.90, 0.75, 0.68, 0.57, 0.46)),
    ("embedded", "taskmaster"): (4.217, (0.86, 0.80, 0.78, 0.71, 0.67)),
    ("shared", "sgd"): (3.777, (0.86, 0.72, 0.63, 0.53, 0.43)),  # where the two differ most
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), FIGURES)
@pytest.mark.thorough(every=4)
def test_demo_drafters_reach_the_figures_of_their_cards(which: str, name: str) -> None:
    """75 prompts, greedy, a chain of 5, fp32, at most 128 new tokens, end at EOS; in batches of like length."""
    ours = drafter_of("demo-target")
    if which == "embedded":
        ours = Eagle31Drafter.from_pretrained(drafter_path(), target=target_of("demo-target"))
    prompts = sorted(held_out_prompts(name), key=len)
    rounds = accepted = 0
    per_position = torch.zeros(2, 5)
    fixed = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    with configured(ours, **fixed, speculation_loop="own") as drafter:
        for start in range(0, 75, 15):
            inputs = left_padded(prompts[start : start + 15])
            greedy("demo-target", inputs, assistant_model=drafter, max_new_tokens=128)
            stats = drafter.stats
            assert stats is not None
            rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
            per_position += torch.tensor([stats.accepted_at, stats.drafted_at])
    length, positions = FIGURES[which, name]
    assert (accepted + rounds) / rounds == pytest.approx(length, rel=0.01)
    assert (per_position[0] / per_position[1]).tolist() == pytest.approx(positions, abs=0.02)
