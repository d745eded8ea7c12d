"""`Eagle31CandidateGenerator` in transformers' own assisted loop: the text is plain's, and drafts are accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from greedy_calls import greedy
from torch import Tensor
from transformers import GenerationMixin

from eagle31_hf import Eagle31CandidateGenerator, SpeculationStats
from helpers import configured, drafter_of, left_padded, prompts_for

pytestmark = pytest.mark.contract


def by_transformers(name: str, monkeypatch: pytest.MonkeyPatch, inputs: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """A text by transformers' loop, and the figures of its drafts."""
    drafter, stats = drafter_of(name), SpeculationStats()

    def generator(self: Any, generation_config: Any, **given: Any) -> Eagle31CandidateGenerator:
        return Eagle31CandidateGenerator(drafter, generation_config, given["logits_processor"], stats)

    with monkeypatch.context() as patched, drafter.binding.capturing():
        patched.setattr(GenerationMixin, "_get_candidate_generator", generator)
        return greedy(name, inputs, prompt_lookup_num_tokens=1, **kwargs), stats  # any way to draft leads there


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "demo-target"])
@pytest.mark.parametrize("how", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])
def test_the_text_is_plains(name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = 0
    for seed, depth in enumerate((1, 3, 6)):
        inputs = left_padded(prompts_for(name, 1, seed=seed))
        plain = greedy(name, inputs, max_new_tokens=24, **how)
        with configured(drafter_of(name), num_assistant_tokens=depth):
            ours, stats = by_transformers(name, monkeypatch, inputs, max_new_tokens=24, **how)
        assert torch.equal(ours, plain)
        assert stats.new_tokens == 24
        assert stats.drafted > 0
        accepted += stats.accepted
    assert name != "demo-target" or accepted > 10, "a trained drafter is often right"


def test_it_ends_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = left_padded(prompts_for("demo-target", 1))
    free = greedy("demo-target", inputs, max_new_tokens=24)
    ends = {"max_new_tokens": 24, "eos_token_id": int(free[0, -9])}
    plain = greedy("demo-target", inputs, **ends)
    ours, _ = by_transformers("demo-target", monkeypatch, inputs, **ends)
    assert torch.equal(ours, plain)


def test_a_drafter_of_nan_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, inputs = drafter_of("llama"), left_padded(prompts_for("llama", 1))
    sound = drafter.draft_logits
    monkeypatch.setattr(drafter, "draft_logits", lambda *given: torch.full_like(sound(*given), float("nan")))
    ours, stats = by_transformers("llama", monkeypatch, inputs)
    assert torch.equal(ours, greedy("llama", inputs))
    assert stats.drafted == 0
