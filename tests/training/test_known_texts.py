"""Acceptance told from known texts is what `generate` accepts while writing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.sampling.draw import choose
from eagle31_hf.stats import Acceptance
from eagle31_hf.training.measure import EvaluationPrompt, acceptance_along, write_texts
from helpers import configured, drafter_of, prompts_for

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def drafter() -> Eagle31Drafter:
    return drafter_of("demo-target")


@pytest.fixture(scope="module")
def prompts() -> list[EvaluationPrompt]:
    ordered = sorted(prompts_for("demo-target", 6), key=len)
    return [EvaluationPrompt(ids, str(number)) for number, ids in enumerate(ordered)]


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 3), (0.0, 8), (0.6, 4), (1.0, 4)])
@pytest.mark.thorough(every=2)
def test_rounds_are_those_of_generate(
    drafter: Eagle31Drafter, prompts: list, monkeypatch: pytest.MonkeyPatch, temperature: float, depth: int
) -> None:
    """Texts are written one by one, the sampled ones by the noise that `generate` draws."""
    model: Any = drafter.binding.model
    plain, served = model.generate, []

    def with_drafter(**options: Any) -> Any:
        if "custom_generate" in options:
            return plain(**options)
        out = plain(**options, assistant_model=drafter)
        served.append(drafter.stats)
        return out

    monkeypatch.setattr(model, "generate", with_drafter)
    with configured(drafter, num_assistant_tokens=depth, num_assistant_tokens_schedule="constant"):
        texts = write_texts(drafter.binding, prompts, temperature, max_new_tokens=NEW_TOKENS, batch_size=1)
    monkeypatch.undo()
    found = acceptance_along(drafter, texts, depth)
    for ours, theirs in zip(found.values(), served, strict=True):
        assert (ours.rounds, ours.accepted) == (theirs.rounds, theirs.accepted)
        assert ours.accepted_at == [*theirs.accepted_at, *[0] * depth][:depth]
    assert Acceptance.of(found.values()).acceptance_length > 2


def test_noise_of_a_batch_is_that_its_texts_were_sampled_by(drafter: Eagle31Drafter, prompts: list) -> None:
    texts = write_texts(drafter.binding, prompts, 0.8, max_new_tokens=12, batch_size=3, seed=4)
    model: Any = drafter.binding.model
    for known in texts:
        ids, first = known.text.ids, known.text.prompt_length
        assert known.noise is not None
        with torch.no_grad():
            logits = model(ids[None]).logits[0, first - 1 : -1]
        assert torch.equal(choose(known.warping(logits), known.noise()), ids[first:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processors_that_look_at_the_text_are_left_out(
    drafter: Eagle31Drafter, prompts: list, temperature: float
) -> None:
    """So that acceptance can be told of targets whose generation config has some (Qwen2.5's repetition penalty)."""
    model: Any = drafter.binding.model
    bare = write_texts(drafter.binding, prompts, temperature, max_new_tokens=12)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.generation_config, "repetition_penalty", 1.5)
        patched.setattr(model.generation_config, "no_repeat_ngram_size", 2)
        texts = write_texts(drafter.binding, prompts, temperature, max_new_tokens=12)
        assert model.generation_config.repetition_penalty == 1.5
    assert all(torch.equal(*(each.text.ids for each in pair)) for pair in zip(texts, bare, strict=True))
    assert texts[0].warping.key == bare[0].warping.key


def test_texts_end_where_the_target_ends_them(drafter: Eagle31Drafter, prompts: list) -> None:
    binding = drafter.binding
    texts = write_texts(binding, prompts, 0.0, max_new_tokens=NEW_TOKENS)
    third = int(texts[0].text.ids[texts[0].text.prompt_length + 2])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(binding.model.generation_config, "eos_token_id", [2, third])
        shorter = write_texts(binding, prompts[:1], 0.0, max_new_tokens=NEW_TOKENS)
        first = int(texts[0].text.ids[texts[0].text.prompt_length])
        patched.setattr(binding.model.generation_config, "eos_token_id", [2, first])
        with pytest.raises(ConfigurationError, match="ends its text at once"):
            write_texts(binding, prompts[:1], 0.0, max_new_tokens=NEW_TOKENS)
    assert int(shorter[0].text.ids[-1]) == third
    assert len(shorter[0].text.ids) - shorter[0].text.prompt_length <= 3
