"""A cache carried from turn to turn: the text of a plain `generate` without any cache, and no history read twice."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from carried_turns import (
    FULL,
    SLIDING,
    after_one_turn,
    assert_reads,
    assert_same_contents,
    equal_rows,
    new_cache,
    ours,
    plain,
    prompt_of,
    target_positions,
    users_turn,
)
from transformers import DynamicCache

from helpers import (
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    random_prompts,
)

pytestmark = pytest.mark.contract

SHAPES = {"chain": {"draft_top_k": 1}, "tree": {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 3}}


# --- turn after turn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*FULL, *SLIDING, "demo-target"])
def test_dialogue_is_the_plain_one_and_reads_only_what_is_new(name, shape):
    text, cache, read = prompt_of(name), new_cache(name), 0
    with configured(drafter_of(name), **SHAPES[shape]):
        for turn in range(3):
            truth = plain(name, text)
            with oracle_drafts(truth, text.shape[1], seed=turn), target_positions(name) as counts:
                written = ours(name, text, cache)
            assert torch.equal(written, truth)
            assert counts[0] == text.shape[1] - read
            assert all(count <= 8 for count in counts[1:])
            read = cache.get_seq_length()
            assert read == written.shape[1] - 1
            text = users_turn(written, turn)
        fresh = new_cache(name)
        ours(name, written[:, :-1], fresh, max_new_tokens=1)
    assert_same_contents(cache, fresh)
    assert_same_contents(cache.eagle31_state.drafter_cache, fresh.eagle31_state.drafter_cache)


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_new_tokens_alone_are_decoded_plainly(name):
    """With a mask of full length; the turn after it may show the whole text again."""
    text, cache = after_one_turn(name)
    known, text = cache.get_seq_length(), users_turn(text)
    written = ours(name, text[:, known:], cache, attention_mask=torch.ones_like(text))
    truth = plain(name, text)
    assert torch.equal(written, truth[:, known:])
    assert "pass the whole text" in drafter_of(name).stats.reason
    assert torch.equal(ours(name, users_turn(truth, 1), cache), plain(name, users_turn(truth, 1)))


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_plain_generate_goes_on_from_our_cache(name):
    text, cache = after_one_turn(name)
    output = ours(name, users_turn(text), None, return_dict_in_generate=True)
    theirs = plain(name, users_turn(text), return_dict_in_generate=True, use_cache=True)
    assert_same_contents(output.past_key_values, theirs.past_key_values)
    ours(name, users_turn(text), cache)
    assert_same_contents(cache, theirs.past_key_values)
    later = users_turn(output.sequences, 1)
    for carried in (cache, output.past_key_values):
        assert torch.equal(plain(name, later, past_key_values=carried), plain(name, later))


def test_the_users_cache_is_the_one_returned():
    cache = new_cache("llama")
    output = ours("llama", prompt_of("llama"), cache, return_dict_in_generate=True)
    assert output.past_key_values is cache
    assert torch.equal(cache.eagle31_state.token_ids, output.sequences)


def test_a_cache_made_without_config_serves_a_sliding_model():
    cache = DynamicCache()
    text = ours("mistral", prompt_of("mistral"), cache)
    assert torch.equal(ours("mistral", users_turn(text), cache), plain("mistral", users_turn(text)))
    later = users_turn(plain("mistral", users_turn(text)), 1)
    assert torch.equal(plain("mistral", later, past_key_values=cache), plain("mistral", later))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_copy_carries_everything(name, copied):
    text, cache = after_one_turn(name)
    twin = copied(cache)
    text = users_turn(text)
    for carried in (twin, cache):  # what happens to one is nothing to the other
        assert_reads(6, name, text, carried)


def test_a_turn_of_one_token_and_the_same_prompt_again():
    text, cache = after_one_turn("llama")
    one = ours("llama", text, cache, max_new_tokens=1)
    assert torch.equal(one, plain("llama", text, max_new_tokens=1))
    assert_reads(1, "llama", one, cache)


def test_sampling_draws_the_same_with_a_carried_cache():
    """The drafter's state is the same, so the same seed gives the same drafts, verdicts and text."""
    text, cache = after_one_turn("demo-target")
    text = users_turn(text)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=16)
    drafter = drafter_of("demo-target")
    torch.manual_seed(5)
    without, acceptance = ours("demo-target", text, None, **settings), drafter.stats.accepted_at
    torch.manual_seed(5)
    assert torch.equal(ours("demo-target", text, cache, **settings), without)
    assert drafter.stats.accepted_at == acceptance
    assert sum(acceptance) > 0


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_batch_carries_its_cache_by_plain_decoding(name, only_new):
    text, cache, theirs = equal_rows(name), new_cache(name), new_cache(name)
    for turn in range(3):
        known = cache.get_seq_length() if only_new else 0
        mask = torch.ones_like(text)
        truth = plain(name, text[:, known:], past_key_values=theirs, attention_mask=mask)
        assert torch.equal(ours(name, text[:, known:], cache, attention_mask=mask), truth)
        stats = drafter_of(name).stats
        assert (stats.loop, "batch's" in stats.reason or only_new) == ("plain", True)
        assert_same_contents(cache, theirs)
        text = users_turn(torch.cat((text[:, :known], truth), 1), turn)


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_batch_without_a_cache_of_its_own_is_drafted_and_hands_none_over(name):
    text = equal_rows(name)
    truth = plain(name, text)
    with oracle_drafts(truth, text.shape[1]):
        output = ours(name, text, None, return_dict_in_generate=True)
    assert torch.equal(output.sequences, truth)
    assert output.past_key_values is None
    assert drafter_of(name).stats.loop == "own"


def test_padded_rows_cannot_continue_a_cache():
    inputs = left_padded(random_prompts(2, seed=2))
    assert inputs["attention_mask"].min() == 0
    cache = new_cache("llama")
    text = ours("llama", inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
    assert torch.equal(text, plain("llama", inputs["input_ids"], attention_mask=inputs["attention_mask"]))
    assert drafter_of("llama").stats.loop == "plain"
    text, cache = after_one_turn("llama")
    text = torch.full((1, cache.get_seq_length() + 6), 5)
    mask = torch.ones_like(text)
    mask[0, 0] = 0
    assert torch.equal(ours("llama", text, cache, attention_mask=mask), plain("llama", text, attention_mask=mask))
    assert "mask has pads" in drafter_of("llama").stats.reason
