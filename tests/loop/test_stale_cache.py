"""Carried caches that do not fit the text any more, or cannot be: they are found out, and the text is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from carried_turns import (
    FULL,
    NEW,
    SLIDING,
    after_one_turn,
    assert_reads,
    assert_same_contents,
    equal_rows,
    new_cache,
    ours,
    plain,
    prompt_of,
    users_turn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BitsAndBytesConfig, DynamicCache

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter.packed_linear import packed_tensors
from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.loop.carried_cache import fingerprint
from helpers import Shown, drafter_of, random_drafter, random_target, target_of

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("name", "again"), [("llama", 4), ("mistral", 0), ("gemma3", 0)])
def test_an_edited_history_is_read_again_from_the_edit_on(name, again):
    text, cache = after_one_turn(name)
    edited = users_turn(text)
    edited[0, 5] = (edited[0, 5] + 1) % 90 + 3
    truth = plain(name, edited)
    assert not torch.equal(plain(name, edited, past_key_values=copy.deepcopy(cache)), truth)  # what we guard against
    assert_reads(edited.shape[1] - again, name, edited, cache)  # a window that has slid cannot go back: from the start
    assert "do not hold" in drafter_of(name).stats.fallbacks[0]
    fresh = new_cache(name)
    ours(name, edited, fresh)
    assert_same_contents(cache, fresh)
    assert_same_contents(cache.eagle31_state.drafter_cache, fresh.eagle31_state.drafter_cache)


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_plain_turn_in_between(name):
    text, cache = after_one_turn(name)
    between = plain(name, users_turn(text), past_key_values=cache)
    later = users_turn(between, 1)
    written = assert_reads(later.shape[1] - (text.shape[1] - 1 if name in FULL else 0), name, later, cache)
    assert_reads(6, name, users_turn(written, 2), cache)


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_cache_without_a_record(name):
    text, cache = prompt_of(name), new_cache(name)
    text = users_turn(plain(name, text, past_key_values=cache))
    assert_reads(text.shape[1], name, text, cache)  # of unknown text: read it all


@pytest.mark.parametrize("other", ["target", "drafter"])
def test_another_target_or_drafter_trusts_nothing(other):
    text, cache = after_one_turn("llama")
    target = target_of("llama") if other == "drafter" else random_target(target_of("llama").config, seed=5)
    drafter, read = random_drafter(target, seed=7), []
    handle = target.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    text = users_turn(text)
    how = {"attention_mask": torch.ones_like(text), "max_new_tokens": NEW, "do_sample": False}
    truth = target.generate(text, **how)
    read.clear()
    assert torch.equal(target.generate(text, **how, assistant_model=drafter, past_key_values=cache), truth)
    assert read[0] == text.shape[1]
    handle.remove()
    drafter.detach()


CHANGES = ["go on", "edit", "cut", "crop", "refill"]
TURN = st.tuples(st.sampled_from(["ours", "plain"]), st.sampled_from(CHANGES), st.integers(0, 30))


@settings(max_examples=15, deadline=None)
@given(turns=st.lists(TURN, min_size=2, max_size=4))
def test_whatever_happened_to_the_cache_the_text_is_right(turns):
    text, cache = prompt_of("llama"), new_cache("llama")
    for number, (loop, change, place) in enumerate(turns):
        if change == "edit":
            text = text.clone()
            text[0, place % text.shape[1]] = 3 + place
        elif change == "cut":
            text = text[:, : 2 + place]
        elif change == "crop" and cache.get_seq_length() > place:
            cache.crop(-place)
        elif change == "refill":
            cache.reset()  # which keeps its length in transformers 5.17
            other = users_turn(prompt_of("llama", place), place, tokens=cache.get_seq_length())
            plain("llama", other, past_key_values=cache, max_new_tokens=60)
        text = users_turn(text, number)
        truth = plain("llama", text, max_new_tokens=4)
        if loop == "ours":
            assert torch.equal(ours("llama", text, cache, max_new_tokens=4), truth)
        elif text.shape[1] > cache.get_seq_length():
            plain("llama", text, max_new_tokens=4, past_key_values=cache)  # wrong after an edit, and left in the cache
        text = truth


def test_fingerprints_follow_the_weights():
    drafter = random_drafter(target_of("llama"), seed=4)
    before = fingerprint(drafter)
    assert before == fingerprint(copy.deepcopy(drafter)) != fingerprint(drafter_of("llama"))
    with torch.no_grad():
        next(iter(drafter.fc.parameters())).add_(1e-3)
    drafter.detach()
    assert fingerprint(drafter) != before


def test_fingerprints_tell_how_a_drafter_is_packed(tmp_path):
    """Its keys are other numbers then: a cache written by one is not for the other."""
    pytest.importorskip("bitsandbytes")
    random_drafter(target_of("llama"), seed=4).save_pretrained(tmp_path)
    packings = (None, {"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
                {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"})  # fmt: skip

    def load(packing):
        config = None if packing is None else BitsAndBytesConfig(**packing)
        return Eagle31Drafter.from_pretrained(tmp_path, target=target_of("llama"), quantization_config=config)

    found = [fingerprint(load(packing)) for packing in packings]
    assert len(set(found)) == len(packings)
    assert found == [fingerprint(load(packing)) for packing in packings]
    other = load(packings[1])
    next(iter(packed_tensors(other).values())).fill_(1)
    assert fingerprint(other) != found[1], "packed weights that were trained further"


# --- what is refused, and turns that break off ------------------------------------------------------------------------


def test_a_cache_of_other_rows_is_refused():
    cache = new_cache("llama")
    text = users_turn(plain("llama", equal_rows("llama"), past_key_values=cache))
    with pytest.raises(UnsupportedGenerationError, match="1 rows"):
        ours("llama", text[:1], cache)


class Broken(Exception):
    pass


@pytest.mark.parametrize("puts", [1, 3])  # in the prefill, in a later round
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_an_interrupted_turn_leaves_the_cache_usable(name, puts):
    text, cache = after_one_turn(name)
    text, before = users_turn(text), copy.deepcopy(cache)
    with pytest.raises(Broken):
        ours(name, text, cache, streamer=Shown(Broken, after=puts))
    assert_same_contents(cache, before)
    assert_reads(6, name, text, cache)


def test_a_failure_while_refilling_empties_the_cache(monkeypatch):
    text, cache = after_one_turn("llama")
    text = users_turn(text)
    update = DynamicCache.update

    def failing(self: DynamicCache, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self is cache and layer_idx == 2:
            raise Broken
        return update(self, keys, values, layer_idx, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "update", failing)
        with pytest.raises(Broken):
            ours("llama", text, cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(ours("llama", text, cache), plain("llama", text))
