"""What a request leaves out is as the target's generation config has it: served texts are `generate`'s, called with the
same settings and the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_no_numbers import Listener
from transformers import GenerationConfig, LlamaConfig

from eagle31_hf.serving.api import Translator
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.bodies import ChatBody, CompletionBody, parse
from eagle31_hf.serving.engine import Engine
from eagle31_hf.serving.rows import unfollowed
from helpers import GROUPED, demo_tokenizer, random_drafter, random_target, seeded

NEW_TOKENS = 12
PUBLISHED: dict[str, dict[str, Any]] = {
    "none": {},
    "Qwen3": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "Llama 3.1": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    "Gemma 3": {"do_sample": True, "top_k": 64, "top_p": 0.95},
    "Mistral": {"do_sample": False},
    "gpt-oss": {"do_sample": True},
    "penalised": {"do_sample": True, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": [7, 9]},
    "rare": {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 1e-3, "min_new_tokens": 6, "top_k": 0,
             "bad_words_ids": [[11, 12], [13]], "sequence_bias": [[[15], 4.0]], "encoder_no_repeat_ngram_size": 2},
    "least length": {"min_length": 20, "begin_suppress_tokens": [40]},
    "set to nothing by 0": {"do_sample": True, "min_new_tokens": 6, "min_p": 0.2, "top_k": 4, "bad_words_ids": [[13]]},
    "ends where it may": {"min_length": 40, "sequence_bias": [[[2], 90.0]]},
}  # fmt: skip
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.3, 0.7, 1, 1.5]),
        "top_k": st.sampled_from([-1, 0, 3, 40, 200]),
        "top_p": st.sampled_from([0.2, 0.9, 1]),
        "min_p": st.sampled_from([0, 0.02, 0.3]),
        "typical_p": st.sampled_from([0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.9, 1, 1.3]),
        "min_tokens": st.sampled_from([0, 8]),
    },
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    target = random_target(LlamaConfig(**{**GROUPED, "vocab_size": 8192}))
    made = Engine(random_drafter(target), demo_tokenizer(), EngineSettings(max_rows=2, context=128, prefill_chunk=16))
    yield made
    made.close(0)


@contextmanager
def generation_config(target: Any, **fields: Any) -> Iterator[None]:
    before, target.generation_config = target.generation_config, GenerationConfig(eos_token_id=2, **fields)
    try:
        yield
    finally:
        target.generation_config = before


def served(engine: Engine, body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt's ids, and those written."""
    asked = parse(CompletionBody, {"model": "x", "prompt": "Once upon a time", "max_tokens": NEW_TOKENS, **body})
    (request,) = Translator(engine).texts_of(asked)
    listener = Listener()
    engine.submit(request, listener)
    assert listener.ended.wait(60)
    assert listener.finish != "error", listener.error
    return list(request.prompt), listener.tokens


def generated(engine: Engine, prompt: list[int], seed: int, body: dict[str, Any]) -> list[int]:
    names = {"min_tokens": "min_new_tokens"}
    kwargs = {names.get(name, name): value for name, value in body.items()}
    if "temperature" in kwargs:
        kwargs["do_sample"] = kwargs["temperature"] > 0
        if not kwargs["temperature"]:
            del kwargs["temperature"]
    if "top_k" in kwargs:
        kwargs["top_k"] = max(kwargs["top_k"], 0)
    ids = torch.tensor([prompt])
    with seeded(seed):
        out = engine.drafter.binding.model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=NEW_TOKENS, **kwargs
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_served_texts_are_generates(engine: Engine, name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(FIELDS, st.integers(0, 99))
    def check(body: dict[str, Any], seed: int) -> None:
        prompt, tokens = served(engine, {**body, "seed": seed})
        assert tokens == generated(engine, prompt, seed, body)

    with generation_config(engine.drafter.binding.model, **PUBLISHED[name]):
        check()


def test_what_cannot_be_followed_is_named(engine: Engine) -> None:
    fields: dict[str, Any] = {"guidance_scale": 1.5, "num_beams": 3, "max_time": 5.0, "temperature": 0.5}
    with generation_config(engine.drafter.binding.model, **fields):
        assert sorted(engine.unfollowed) == ["guidance_scale", "max_time", "num_beams"]
        assert served(engine, {"temperature": 0})[1]
    assert unfollowed(GenerationConfig(num_beams=1, guidance_scale=1.0)) == []


def test_an_answer_is_as_long_as_the_config_lets_it_be(engine: Engine) -> None:
    body = parse(ChatBody, {"messages": [{"role": "user", "content": "Hello"}]})
    with generation_config(engine.drafter.binding.model, max_new_tokens=5):
        (request,) = Translator(engine).texts_of(body)
    assert request.max_new_tokens == 5
