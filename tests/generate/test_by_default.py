"""A drafter that drafts for every `generate` of its target, whoever calls it."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache, TextGenerationPipeline
from transformers.generation import configuration_utils

from eagle31_hf import Eagle31Drafter, NoDrafter
from helpers import DEMO_DRAFTER, Shown, demo_tokenizer, target_of

CHAT = [{"role": "user", "content": "What is the weather going to be like in Portland this weekend?"}]


@pytest.fixture
def eagle() -> Iterator[Eagle31Drafter]:
    drafter = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target_of("demo-target")).use_by_default()
    yield drafter
    drafter.detach()


@pytest.fixture
def target(eagle: Eagle31Drafter) -> Any:
    return eagle.binding.model


def written(model: Any, **kwargs: Any) -> Any:
    inputs = demo_tokenizer().apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=24, **{"do_sample": False, **kwargs})


@pytest.mark.parametrize("sampled", [False, True])
def test_every_call_drafts_and_writes_plains_text(eagle, target, sampled):
    plain = written(target, do_sample=sampled, assistant_model=None)
    assert eagle.stats is None, "no assistant for this one call"
    assert torch.equal(written(target, do_sample=sampled), plain)
    assert eagle.stats.loop == "own"
    assert eagle.stats.passes < eagle.stats.new_tokens - 4


def test_a_pipeline_drafts_until_the_drafter_is_detached(eagle, target):
    pipeline = TextGenerationPipeline(model=target, tokenizer=demo_tokenizer())
    said = pipeline(CHAT, max_new_tokens=24, do_sample=False)[0]["generated_text"]
    assert eagle.stats.passes < eagle.stats.new_tokens - 4
    eagle.detach()
    eagle.stats = None
    assert pipeline(CHAT, max_new_tokens=24, do_sample=False)[0]["generated_text"] == said
    assert eagle.stats is None


def test_an_assistant_or_a_way_to_draft_of_the_calls_own_wins(eagle, target):
    other = NoDrafter(target)
    written(target, assistant_model=other)
    assert other.stats.loop == "own"
    written(target, prompt_lookup_num_tokens=3)
    assert eagle.stats is None
    other.detach()


def test_the_second_takes_the_firsts_place(eagle, target):
    second = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)
    with pytest.warns(UserWarning, match="another default assistant"):
        second.use_by_default()
    written(target)
    assert (eagle.stats, second.stats.loop) == (None, "own")
    eagle.detach()  # of one that is the default no more
    written(target)
    assert second.stats.loop == "own"
    second.detach()


@pytest.mark.parametrize(
    "kwargs",
    [{"num_beams": 2}, {"num_beams": 2, "do_sample": True}, {"use_cache": False}, {"cache_implementation": "static"},
     {"dola_layers": "low"}, {"penalty_alpha": 0.6, "top_k": 4}],
    ids=["beams", "sampled beams", "no cache", "static cache", "dola", "contrastive"],
)  # fmt: skip
def test_what_cannot_be_drafted_for_is_as_it_would_be_without(eagle, target, kwargs):
    def outcome(**assistant: Any) -> Any:
        try:
            return written(target, **kwargs, **assistant).tolist()
        except Exception as error:
            return type(error), str(error)

    plain = outcome(assistant_model=None)
    with mock.patch.object(configuration_utils.logger, "warning") as warned:
        assert outcome() == plain
    assert "num_beams" not in kwargs or not warned.called, "of an assistant that the call has not named"
    if isinstance(plain, list):
        assert eagle.stats.loop == "plain"
        assert eagle.stats.reason


@pytest.mark.parametrize("beams", [1, 2])
def test_errors_of_a_text_that_was_begun_are_passed_on(eagle, target, beams):
    asked = itertools.count(1)

    def fails(*_: Any, **__: Any) -> Any:
        if next(asked) == 5:
            raise RuntimeError("a rule of one's own")
        return False

    with pytest.raises(RuntimeError, match="a rule of one's own"):
        written(target, stopping_criteria=[fails], num_beams=beams)
    assert next(asked) == 6, "asked once only"


def test_a_drafter_that_no_longer_fits_is_left_out(eagle, target):
    plain = written(target, assistant_model=None)
    eagle.generation_config.draft_tree_size, eagle.generation_config.draft_top_k = 7, 1
    assert torch.equal(written(target), plain)
    assert "draft_top_k" in eagle.stats.reason


def test_a_loop_asked_for_by_name_leaves_the_text_to_plain_decoding_and_streams_it_once(eagle, target):
    eagle.generation_config.speculation_loop = "own"
    plain = written(target, assistant_model=None, use_cache=False)
    shown = Shown()
    assert torch.equal(written(target, streamer=shown, use_cache=False), plain)
    assert shown.tokens == plain[0].tolist()
    assert eagle.stats.loop == "plain"
    assert eagle.stats.reason


def test_copies_of_the_target_have_no_assistant(eagle, target):
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert torch.equal(written(twin), written(target, assistant_model=None))
        assert eagle.stats is None


def test_forwards_that_draft_for_another_text_are_not_drafted_for(eagle, target):
    for other in ({"assistant_early_exit": 2}, {"assistant_model": target}):
        eagle.stats = None
        assert len(written(target, **other)[0]) == len(written(target, assistant_model=None)[0])
        assert eagle.stats is None


def test_a_carried_cache_that_our_loop_cannot_continue_is_plains_business(eagle, target):
    def again(**kwargs: Any) -> Any:
        shown, cache = Shown(), DynamicCache(config=target.config)
        text = written(target, past_key_values=cache, assistant_model=None)
        mask = torch.ones_like(text)
        mask[:, 0] = 0
        how = {"attention_mask": mask, "past_key_values": cache, "do_sample": False, "max_new_tokens": 8}
        return target.generate(text, streamer=shown, **how, **kwargs).tolist(), shown.tokens

    plain = again(assistant_model=None)
    assert again() == plain
    assert eagle.stats.loop == "plain"
    assert "mask has pads" in eagle.stats.reason


def test_what_is_found_out_behind_the_prompt_streams_it_once(eagle, target):
    shown, ids = Shown(), torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(RuntimeError):  # as plain decoding
        target.generate(ids, attention_mask=torch.ones(1, 3), streamer=shown, max_new_tokens=4, do_sample=False)
    assert shown.tokens == [5, 6, 7, 8]
    assert "mask covers" in eagle.stats.reason
