"""A cache carried from turn to turn: the text of a plain `generate` without any cache, and no history read twice.

One that does not fit the text any more, or cannot be carried, is found out.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BitsAndBytesConfig, DynamicCache

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.drafter.packed_linear import packed_tensors
from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.loop.carried_cache import fingerprint
from helpers import (
    Shown,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    random_prompts,
    random_target,
    target_of,
)

pytestmark = pytest.mark.contract

SHAPES = {"chain": {"draft_top_k": 1}, "tree": {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 3}}
FULL, SLIDING = ("llama",), ("mistral", "gemma3")
NEW = 10


def prompt_of(name: str, seed: int = 3) -> Tensor:
    return torch.tensor([prompts_for(name, 1, seed)[0]])


def new_cache(name: str) -> DynamicCache:
    return DynamicCache(config=target_of(name).config)


def plain(name: str, text: Tensor, **kwargs: Any) -> Tensor:
    # Random text has pad ids in it; without a mask, `generate` would take them for padding.
    defaults = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(text)}
    return target_of(name).generate(text, **{**defaults, **kwargs})


def ours(name: str, text: Tensor, cache: DynamicCache | None, **kwargs: Any) -> Any:
    return plain(name, text, assistant_model=drafter_of(name), **{CACHE_ARGUMENT: cache}, **kwargs)


def users_turn(text: Tensor, seed: int = 0, tokens: int = 5) -> Tensor:
    """`text` `(B, T)` with some tokens of the user's, the same in every row."""
    dice = torch.Generator().manual_seed(seed)
    turn = torch.randint(3, 90, (1, tokens), generator=dice).expand(len(text), -1)
    return torch.cat((text, turn), dim=1)


@contextmanager
def target_positions(name: str) -> Iterator[list[int]]:
    """Positions per row of each target forward, as its last layer sees them."""
    drafter_of(name)  # attaching it takes a forward, too
    counts: list[int] = []

    def count(_module: Any, args: tuple, kwargs: dict) -> None:
        counts.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    hook = target_of(name).get_decoder().layers[-1].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def assert_reads(positions: int, name: str, text: Tensor, cache: DynamicCache | None, **kwargs: Any) -> Tensor:
    """The turn is what plain decoding writes without a cache, and the target has read so many positions of `text`."""
    truth = plain(name, text, **kwargs)
    with target_positions(name) as counts:
        written = ours(name, text, cache, **kwargs)
    assert torch.equal(written, truth)
    assert counts[0] == positions
    return written


def assert_same_contents(cache: DynamicCache, other: DynamicCache) -> None:
    assert cache.get_seq_length() == other.get_seq_length()
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        assert type(layer) is type(twin)
        torch.testing.assert_close(layer.keys, twin.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.values, twin.values, rtol=1e-3, atol=1e-4)


def after_one_turn(name: str) -> tuple[Tensor, DynamicCache]:
    cache = new_cache(name)
    return ours(name, prompt_of(name), cache), cache


def equal_rows(name: str) -> Tensor:
    return torch.tensor([(prompt * 9)[:9] for prompt in random_prompts(3, seed=1)])


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


# --- what does not fit any more ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("puts", [1, 3])  # in the prefill, in a later round
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_an_interrupted_turn_leaves_the_cache_usable(name, puts):
    text, cache = after_one_turn(name)
    text, before = users_turn(text), copy.deepcopy(cache)
    with pytest.raises(KeyboardInterrupt):
        ours(name, text, cache, streamer=Shown(KeyboardInterrupt, after=puts))
    assert_same_contents(cache, before)
    assert_reads(6, name, text, cache)


def test_a_failure_while_refilling_empties_the_cache(monkeypatch):
    text, cache = after_one_turn("llama")
    text = users_turn(text)
    update = DynamicCache.update

    def failing(self: DynamicCache, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self is cache and layer_idx == 2:
            raise KeyboardInterrupt
        return update(self, keys, values, layer_idx, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "update", failing)
        with pytest.raises(KeyboardInterrupt):
            ours("llama", text, cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(ours("llama", text, cache), plain("llama", text))
