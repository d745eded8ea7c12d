"""The door to `generate`: nothing stays broken behind it, and calls that are none of ours are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from greedy_calls import greedy, one, stats_of
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path
from eagle31_hf.generate import hooks
from helpers import (
    CONFIGS,
    configured,
    demo_tokenizer,
    drafter_of,
    held_out_prompts,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_target,
    target_of,
)

# --- pipeline ---------------------------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("batch_size", [1, 2])
def test_pipeline(batch_size: int) -> None:
    target, tokenizer = target_of("demo-target"), demo_tokenizer()
    texts = ["How many legs do seven spiders have?", "I need a table for two", "Play some jazz."]
    chats = [[{"role": "user", "content": text}] for text in texts]
    settings = {"max_new_tokens": 20, "do_sample": False, "batch_size": batch_size}
    plain = hf.pipeline("text-generation", model=target, tokenizer=tokenizer)(chats, **settings)
    eagle = hf.pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter_of("demo-target"))
    assert eagle(chats, **settings) == plain
    assert eagle(chats[0], **settings) == plain[0]
    assert stats_of("demo-target").loop == "own"


# --- errors leave everything usable -----------------------------------------------------------------------------------


class Raising(hf.generation.streamers.BaseStreamer):
    """Raises when the `after`-th block arrives."""

    def __init__(self, error: type[BaseException], after: int):
        self.error, self.left = error, after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error("stop")

    def end(self) -> None: ...


@pytest.mark.contract
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_generation_leaves_everything_usable(error: type[BaseException], after: int) -> None:
    plain, drafter = greedy("gemma3", one()), drafter_of("gemma3")
    with pytest.raises(error):
        greedy("gemma3", one(), assistant_model=drafter, streamer=Raising(error, after))
    assert not drafter.binding.taps.are_open
    assert drafter.binding.taps.are_empty
    assert torch.equal(greedy("gemma3", one(), assistant_model=drafter), plain)
    assert torch.equal(greedy("gemma3", one()), plain)


def test_interrupted_in_the_middle_of_a_forward() -> None:
    plain = greedy("llama", one())
    drafter = drafter_of("llama")
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    handle = target_of("llama").model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy("llama", one(), assistant_model=drafter)
    handle.remove()
    assert torch.equal(greedy("llama", one(), assistant_model=drafter), plain)


class OutOfTheCallersMemory(hf.LogitsProcessor, hf.StoppingCriteria):
    """A processor or criterion that asks for more memory than there is, the third time it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("the caller's own")
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"])
def test_memory_that_the_callers_code_runs_out_of_is_not_the_targets(where: str) -> None:
    code = OutOfTheCallersMemory()
    given: Any = [code]
    if where == "prefix_allowed_tokens_fn":

        def given(row: int, ids: Tensor) -> list[int]:
            code(ids, ids)
            return list(range(96))

    with pytest.raises(torch.OutOfMemoryError, match="the caller's own"):
        greedy("llama", one(), assistant_model=drafter_of("llama"), **{where: given})
    assert code.calls == 3, "it is not asked again"
    assert stats_of().memory_steps == {}
    assert torch.equal(greedy("llama", one(), assistant_model=drafter_of("llama")), greedy("llama", one()))


# --- others are left alone --------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_other_ways_to_generate_are_untouched() -> None:
    plain = greedy("llama", one())
    assert torch.equal(greedy("llama", one(), prompt_lookup_num_tokens=3), plain)
    assistant = random_target(CONFIGS["llama"](), seed=4)
    assert torch.equal(greedy("llama", one(), assistant_model=assistant), plain)
    with pytest.raises(ValueError, match="num_return_sequences"):
        greedy("llama", one(), assistant_model=assistant, do_sample=True, num_return_sequences=2)


def test_beams_are_transformers_business() -> None:
    greedy("llama", one(), assistant_model=drafter_of("llama"))
    beams = greedy("llama", one(), num_beams=3)
    assert torch.equal(greedy("llama", one(), num_beams=3, assistant_model=drafter_of("llama")), beams)
    assert (stats_of().loop, stats_of().rounds) == ("plain", 0), "not those of the call before"
    assert "beam search" in stats_of().reason


def test_installing_twice_wraps_once() -> None:
    wrapped = hf.GenerationMixin._assisted_decoding
    hooks.install()
    assert hf.GenerationMixin._assisted_decoding is wrapped


def test_generate_leaves_its_arguments_alone() -> None:
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    inputs = left_padded(prompts_for("llama", 3))
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target_of("llama").generate(**inputs, generation_config=config, assistant_model=drafter_of("llama"))
    assert config.to_dict() == before
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert target_of("llama").generation_config.num_assistant_tokens in (None, 20)


# --- a drafter that is never right ------------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_drafter_that_is_never_right_never_changes_the_text() -> None:
    inputs = one()
    plain = greedy("llama", inputs)
    wrong = (plain + 1) % 96  # never what the target writes next
    follow_all = oracle_drafts(wrong, inputs["input_ids"].shape[1], right=3)
    with configured(drafter_of("llama"), num_assistant_tokens=3) as drafter, follow_all:
        ours = greedy("llama", inputs, assistant_model=drafter)
    assert torch.equal(ours, plain)
    assert stats_of().accepted == 0
    assert stats_of().rounds == 15, "one token a round"
    assert stats_of().acceptance_length == 1.0


# --- the demo drafter -------------------------------------------------------------------------------------------------

FIGURES = {
    ("embedded", "gsm8k"): (4.504, (0.87, 0.77, 0.67, 0.62, 0.58)),
    ("embedded", "sgd"): (4.461, (0.90, 0.76, 0.69, 0.60, 0.52)),
    ("embedded", "taskmaster"): (4.565, (0.86, 0.79, 0.74, 0.63, 0.55)),
    ("shared", "sgd"): (4.300, (0.86, 0.73, 0.65, 0.56, 0.49)),  # where the two differ most
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
