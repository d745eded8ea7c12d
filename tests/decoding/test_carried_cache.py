"""A cache carried from turn to turn: the text of a plain `generate` without any cache, and no history read twice."""

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
from eagle31_hf.decoding.carried_cache import fingerprint
from eagle31_hf.drafter.packed_linear import packed_tensors
from eagle31_hf.errors import UnsupportedGenerationError
from helpers import (
    configured,
    demo_tokenizer,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    random_prompts,
    target_of,
    use_fixed_shapes_only,
)

pytestmark = pytest.mark.contract

FULL, SLIDING = ("llama",), ("mistral", "gemma3")
SHAPES = {"chain": {"draft_top_k": 1}, "tree": {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 3}}
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
    return plain(name, text, assistant_model=drafter_of(name), past_key_values=cache, **kwargs)


def users_turn(text: Tensor, seed: int = 0, tokens: int = 5) -> Tensor:
    """`text` `(B, T)` with some tokens of the user's, the same in every row."""
    dice = torch.Generator().manual_seed(seed)
    turn = torch.randint(3, 90, (1, tokens), generator=dice).expand(len(text), -1)
    return torch.cat((text, turn), dim=1)


@contextmanager
def target_positions(name: str) -> Iterator[list[int]]:
    """Positions per row of each target forward, as its last layer sees them."""
    counts: list[int] = []

    def count(_module: Any, args: tuple, kwargs: dict) -> None:
        counts.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    hook = target_of(name).get_decoder().layers[-1].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def assert_same_contents(cache: DynamicCache, other: DynamicCache) -> None:
    assert cache.get_seq_length() == other.get_seq_length()
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        assert type(layer) is type(twin)
        torch.testing.assert_close(layer.keys, twin.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.values, twin.values, rtol=1e-3, atol=1e-4)


def after_one_turn(name: str) -> tuple[Tensor, DynamicCache]:
    cache = new_cache(name)
    return ours(name, prompt_of(name), cache), cache


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


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_new_tokens_alone_with_a_mask_of_full_length(name, chunk):
    text, cache = after_one_turn(name)
    for turn in range(2):
        known = cache.get_seq_length()
        text = users_turn(text, turn)
        truth = plain(name, text)
        with target_positions(name) as counts:
            written = ours(name, text[:, known:], cache, attention_mask=torch.ones_like(text), prefill_chunk_size=chunk)
        assert torch.equal(written, truth[:, known:])
        assert counts[0] == min(chunk or 99, text.shape[1] - known)
        assert torch.equal(cache.eagle31_state.token_ids, truth)
        text = truth
    # The history is on record, so the next turn may show it in full.
    with target_positions(name) as counts:
        assert torch.equal(ours(name, users_turn(text), cache), plain(name, users_turn(text)))
    assert counts[0] == 6


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
        with target_positions(name) as counts:
            assert torch.equal(ours(name, text, carried), plain(name, text))
        assert counts[0] == 6


def test_a_turn_of_one_token_and_the_same_prompt_again():
    text, cache = after_one_turn("llama")
    one = ours("llama", text, cache, max_new_tokens=1)
    assert torch.equal(one, plain("llama", text, max_new_tokens=1))
    with target_positions("llama") as counts:
        assert torch.equal(ours("llama", one, cache), plain("llama", one))
    assert counts[0] == 1


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


# --- what does not hold any more --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "again"), [("llama", 4), ("mistral", 0), ("gemma3", 0)])
def test_an_edited_history_is_read_again_from_the_edit_on(name, again):
    text, cache = after_one_turn(name)
    edited = users_turn(text)
    edited[0, 5] = (edited[0, 5] + 1) % 90 + 3
    truth = plain(name, edited)
    assert not torch.equal(plain(name, edited, past_key_values=copy.deepcopy(cache)), truth)  # what we guard against
    with target_positions(name) as counts:
        assert torch.equal(ours(name, edited, cache), truth)
    assert counts[0] == edited.shape[1] - again  # a window that has slid cannot go back: from the start
    assert "do not hold" in drafter_of(name).stats.fallbacks[0]
    fresh = new_cache(name)
    ours(name, edited, fresh)
    assert_same_contents(cache, fresh)
    assert_same_contents(cache.eagle31_state.drafter_cache, fresh.eagle31_state.drafter_cache)


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_prompt_shorter_than_the_cache(name):
    _, cache = after_one_turn(name)
    shorter = prompt_of(name)[:, :-2]
    assert torch.equal(ours(name, shorter, cache), plain(name, shorter))


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_plain_turn_in_between(name):
    text, cache = after_one_turn(name)
    between = plain(name, users_turn(text), past_key_values=cache)
    later = users_turn(between, 1)
    with target_positions(name) as counts:
        written = ours(name, later, cache)
    assert torch.equal(written, plain(name, later))
    assert counts[0] == later.shape[1] - (text.shape[1] - 1 if name in FULL else 0)
    with target_positions(name) as counts:
        ours(name, users_turn(written, 2), cache)
    assert counts[0] == 6


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_a_cache_without_a_record(name):
    text, cache = prompt_of(name), new_cache(name)
    text = users_turn(plain(name, text, past_key_values=cache))
    known, truth = cache.get_seq_length(), plain(name, text)
    new_only = copy.deepcopy(cache)
    with target_positions(name) as counts:  # of unknown text: read it all
        assert torch.equal(ours(name, text, cache), truth)
    assert counts[0] == text.shape[1]
    for _ in range(2):  # nothing to compare with: believed, and from then on the drafter's state travels, too
        with target_positions(name) as counts:
            written = ours(name, text[:, known:], new_only, attention_mask=torch.ones_like(text))
        assert torch.equal(written, truth[:, known:])
        assert counts[0] == 6
        drafted = new_only.eagle31_state.drafter_cache.get_seq_length()
        text, known = users_turn(truth), new_only.get_seq_length()
        truth = plain(name, text)
    assert drafted == 2 * (NEW + 5)


def test_new_tokens_after_a_cache_that_was_cut_or_reordered():
    """The record no longer says what the cache holds, so it must not become the history of the next one."""
    text, cache = after_one_turn("llama")
    cache.crop(-3)
    known, text = cache.get_seq_length(), users_turn(text[:, : cache.get_seq_length()])
    written = ours("llama", text[:, known:], cache, attention_mask=torch.ones_like(text))
    assert torch.equal(written, plain("llama", text)[:, known:])
    assert (cache.eagle31_state.token_ids[:, :known] < 0).all()

    cache, swapped = new_cache("llama"), torch.tensor([2, 0, 1])
    text = ours("llama", equal_rows("llama"), cache)
    cache.reorder_cache(swapped)
    known, text = cache.get_seq_length(), users_turn(text[swapped])
    written = ours("llama", text[:, known:], cache, attention_mask=torch.ones_like(text))
    assert torch.equal(written, plain("llama", text)[:, known:])
    assert (cache.eagle31_state.token_ids[:, :known] < 0).all()


def test_new_tokens_that_replace_the_last_one_written():
    text, cache = after_one_turn("llama")
    known = cache.get_seq_length()
    text = users_turn(text[:, :known])  # the last token, whose keys are in no cache, is left out
    assert text[0, known] != cache.eagle31_state.token_ids[0, -1]
    before = cache.eagle31_state.drafter_cache.get_seq_length()
    written = ours("llama", text[:, known:], cache, attention_mask=torch.ones_like(text))
    assert torch.equal(written, plain("llama", text)[:, known:])
    # The drafter's last position was joined with that token, so it is dropped and missing from then on.
    assert cache.eagle31_state.drafter_cache.get_seq_length() == before - 1 + 5 + NEW - 1
    later = users_turn(plain("llama", text), 1)
    assert torch.equal(ours("llama", later, cache), plain("llama", later))


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_another_drafter_starts_midway(name):
    text, cache = after_one_turn(name)
    text = users_turn(text)
    truth = plain(name, text)
    drafter = random_drafter(target_of(name), seed=7)
    with oracle_drafts(truth, text.shape[1]), target_positions(name) as counts:
        written = plain(name, text, assistant_model=drafter, past_key_values=cache)
    drafter.detach()
    assert torch.equal(written, truth)
    assert counts[0] == 6
    assert cache.eagle31_state.drafter_cache.get_seq_length() == NEW + 5  # the old one's state is not mixed in
    assert torch.equal(ours(name, users_turn(truth, 1), cache), plain(name, users_turn(truth, 1)))


def test_another_target_trusts_nothing():
    text, cache = after_one_turn("llama")
    cache.eagle31_state = _changed(cache.eagle31_state, target_fingerprint="of other weights")
    text = users_turn(text)
    with target_positions("llama") as counts:
        assert torch.equal(ours("llama", text, cache), plain("llama", text))
    assert counts[0] == text.shape[1]


def _changed(state: Any, **fields: Any) -> Any:
    return type(state)(**{**{name: getattr(state, name) for name in state.__dataclass_fields__}, **fields})


def test_a_cache_refilled_behind_our_back_is_found_out():
    text, cache = after_one_turn("llama")
    cache.reset()
    other = torch.tensor(random_prompts(1, seed=8, longest=30))
    plain("llama", torch.cat((other, other), 1), past_key_values=cache, max_new_tokens=30)
    assert cache.get_seq_length() > text.shape[1]
    assert torch.equal(ours("llama", users_turn(text), cache), plain("llama", users_turn(text)))


@settings(max_examples=12, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["ours", "plain"]), st.sampled_from(["go on", "edit", "cut", "crop"]), st.integers(0, 30)
        ),
        min_size=2,
        max_size=4,
    )
)
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
        text = users_turn(text, number)
        truth = plain("llama", text, max_new_tokens=4)
        if loop == "ours":
            assert torch.equal(ours("llama", text, cache, max_new_tokens=4), truth)
        elif text.shape[1] > cache.get_seq_length():
            plain("llama", text, max_new_tokens=4, past_key_values=cache)  # wrong after an edit, and left in the cache
        text = truth


# --- batches ----------------------------------------------------------------------------------------------------------


def equal_rows(name: str) -> Tensor:
    return torch.tensor([(prompt * 9)[:9] for prompt in random_prompts(3, seed=1)])


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_rows_of_equal_length(name):
    text, cache = equal_rows(name), new_cache(name)
    for turn in range(3):
        truth = plain(name, text)
        with oracle_drafts(truth, text.shape[1], seed=turn), target_positions(name) as counts:
            assert torch.equal(ours(name, text, cache), truth)
        assert counts[0] == (9 if turn == 0 else 6)
        text = users_turn(truth, turn)
    assert torch.equal(plain(name, text, past_key_values=copy.deepcopy(cache)), plain(name, text))
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(ours(name, text, reordered), plain(name, text))


@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_rows_that_stay_for_a_graph_are_handed_over_once(name, monkeypatch):
    """They end in different rounds; what is written beside them afterwards is none of theirs."""
    use_fixed_shapes_only(monkeypatch)
    binding = drafter_of(name).require_binding()
    monkeypatch.setattr(binding, "compiled", None)
    with configured(drafter_of(name), acceleration="compile"):
        test_rows_of_equal_length(name)
    assert {shape[:2] for shape in binding.compiled.keys} >= {("verify", 3), ("absorb", 3)}


@pytest.mark.parametrize("first_to_end", [0, 2])
def test_rows_that_end_unevenly_leave_the_cache_as_it_was(first_to_end):
    text, cache = equal_rows("llama"), new_cache("llama")
    text = users_turn(ours("llama", text, cache))
    before = copy.deepcopy(cache)
    eos = int(plain("llama", text)[first_to_end, text.shape[1] + 2])
    settings = dict(eos_token_id=eos, pad_token_id=0, return_dict_in_generate=True)
    output = ours("llama", text, cache, **settings)
    assert torch.equal(output.sequences, plain("llama", text, **settings).sequences)
    assert output.past_key_values is None
    assert_same_contents(cache, before)
    assert torch.equal(cache.eagle31_state.token_ids, before.eagle31_state.token_ids)


def test_padded_rows_get_no_cache_and_cannot_continue_one():
    inputs, cache = left_padded(random_prompts(2, seed=2)), new_cache("llama")
    assert inputs["attention_mask"].min() == 0
    text = ours("llama", inputs.pop("input_ids"), cache, **inputs)
    assert cache.get_seq_length() == 0
    plain("llama", users_turn(text)[:, -9:], past_key_values=cache)
    mask = torch.ones(2, cache.get_seq_length() + 6)
    mask[0, 0] = 0
    with pytest.raises(UnsupportedGenerationError, match="equally long and unpadded"):
        ours("llama", torch.full((2, mask.shape[1]), 5), cache, attention_mask=mask.long())


# --- requests that do not fit together --------------------------------------------------------------------------------


def test_a_cache_of_other_rows_is_refused():
    text, cache = after_one_turn("llama")
    with pytest.raises(UnsupportedGenerationError, match="2 rows"):
        ours("llama", users_turn(text).expand(2, -1), cache)


def test_a_mask_that_fits_neither_form_is_refused():
    text, cache = after_one_turn("llama")
    text = users_turn(text)
    with pytest.raises(UnsupportedGenerationError, match="or only the tokens after"):
        ours("llama", text[:, -3:], cache, attention_mask=torch.ones_like(text)[:, 1:])


class Broken(Exception):
    pass


class BreakingStreamer:
    def __init__(self, after: int):
        self.left = after

    def put(self, _tokens: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Broken

    def end(self) -> None: ...


@pytest.mark.parametrize("puts", [1, 3])  # in the prefill, in a later round
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_an_interrupted_turn_leaves_the_cache_usable(name, puts):
    text, cache = after_one_turn(name)
    text, before = users_turn(text), copy.deepcopy(cache)
    with pytest.raises(Broken):
        ours(name, text, cache, streamer=BreakingStreamer(puts))
    assert_same_contents(cache, before)
    with target_positions(name) as counts:
        assert torch.equal(ours(name, text, cache), plain(name, text))
    assert counts[0] == 6


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


def test_chat_on_the_demo_pair_accepts_as_much_as_without_a_cache():
    tokenizer, drafter = demo_tokenizer(), drafter_of("demo-target")
    messages, cache = [{"role": "user", "content": "Hello, who are you?"}], new_cache("demo-target")
    for question in ("How many apples are 3 and 4 apples?", "And twice as many?", ""):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        text = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        truth = plain("demo-target", text, max_new_tokens=12)
        ours("demo-target", text, None, max_new_tokens=12)
        alone = drafter.stats.accepted_at
        assert torch.equal(ours("demo-target", text, cache, max_new_tokens=12), truth)
        assert drafter.stats.accepted_at == alone
        answer = tokenizer.decode(truth[0, text.shape[1] :], skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


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
