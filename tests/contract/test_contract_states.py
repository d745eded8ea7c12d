"""The contract for targets whose layers keep states, recurrent or of convolutions: plain's text.

Targets are tiny and random, and remember long (`recurrent_target`), so that a state that is not rolled back shows in
the text.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.loop.carried_cache import BEFORE_THE_ANSWER
from eagle31_hf.targets.binding import cache_argument
from families import RECURRENT_FAMILIES, SEEING_HYBRIDS, clamped_target, recurrent_target
from helpers import (
    VOCABULARY,
    assert_same_text,
    configured,
    oracle_drafts,
    prompts_of,
    random_drafter,
    switching_policies,
)

pytestmark = pytest.mark.contract

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 4},
    "tree": {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9},
}
CHUNK = 16
SOME = ("qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "falcon_h1")
PLAIN = ("jamba", "zaya")
"""Their recurrence is computed by code that cannot be recorded."""
TAPED = [family for family in RECURRENT_FAMILIES if family not in PLAIN]


@cache
def pair(family: str) -> tuple[Any, Any]:
    model = SEEING_HYBRIDS[family].model() if family in SEEING_HYBRIDS else recurrent_target(family)
    return model, random_drafter(model, aux_layers=[1, 2, 3])


GREEDY = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def greedy(model: Any, inputs: dict[str, Any], new_tokens: int = 16, **kwargs: Any) -> Any:
    return model.generate(**inputs, **{**GREEDY, "max_new_tokens": new_tokens}, **kwargs)


def assert_plain(family: str, inputs: dict[str, Tensor], settings: dict[str, Any], **kwargs: Any) -> Tensor:
    how = {"oracle": len(inputs["input_ids"]), **GREEDY, **kwargs}
    return assert_same_text(*pair(family), inputs, settings=settings, **how)


@pytest.mark.parametrize(("family", "shape"), [*product(TAPED, SHAPES)])
def test_text_is_plains(family: str, shape: str) -> None:
    """Alone and in a batch of four of which one prompt is a single token and one shorter than convolutions look. A tree
    that was asked for is drafted as a chain."""
    for lengths in ([23], [1, 3, 30, 12]):
        assert_plain(family, prompts_of(lengths), SHAPES[shape])
        fallbacks = pair(family)[1].stats.fallbacks
        assert [why[:36] for why in fallbacks] == ["trees are drafted as chains of their"] * (shape == "tree")


@pytest.mark.parametrize("family", PLAIN)
def test_states_that_cannot_be_recorded_are_decoded_plainly(family: str) -> None:
    assert_same_text(*pair(family), prompts_of([12, 3]), loop="plain", **GREEDY)
    assert "code that cannot be recorded" in pair(family)[1].stats.reason


@pytest.mark.parametrize("family", SOME)
def test_rounds_of_changing_length(family: str) -> None:
    """Drafts of every length and none, in turn."""
    with switching_policies() as policies:
        assert_plain(family, prompts_of([9, 1, 17, 4]), SHAPES["tree"], max_new_tokens=40, oracle=0)
    assert policies[0].kinds > {"none", "cut"}


@pytest.mark.parametrize("family", SOME)
def test_rows_that_have_ended(family: str) -> None:
    """A stop token inside an accepted block leaves keys and states alike, and rows that go on as they were."""
    model, _ = pair(family)
    inputs = prompts_of([5, 11, 2, 20])
    free = greedy(model, inputs, 20)
    length = inputs["input_ids"].shape[1]
    ends = sorted({int(free[row, length + 3 * row + 2]) for row in range(3)})
    assert_plain(family, inputs, SHAPES["chain"], max_new_tokens=20, eos_token_id=ends)


@pytest.mark.parametrize("family", [*SOME, "zamba2"])
def test_prompts_across_chunks(family: str) -> None:
    """A chunk of the drafter's own: the prompt's text is that of a prompt read at once, with a token left over, too."""
    settings = {**SHAPES["chain"], "prefill_chunk_size": CHUNK}
    for lengths in ([CHUNK + 1], [CHUNK + 1, 2 * CHUNK + 1, 3, 40]):
        assert_plain(family, prompts_of(lengths), settings, max_new_tokens=8)


@pytest.mark.parametrize(
    ("lengths", "chunk", "loop"), [([23, 3], 9, "own"), ([9], 4, "plain"), ([5, 4, 3], 2, "plain")]
)
def test_chunks_of_the_call(lengths: list[int], chunk: int, loop: str) -> None:
    """Plain decoding reads a last chunk of one token by the code for one."""
    model = clamped_target("nemotron_h")
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    assert_same_text(model, drafter, prompts_of(lengths), oracle=0, loop=loop, prefill_chunk_size=chunk, **GREEDY)
    assert drafter.stats.reason == "" or "leaves a single token" in drafter.stats.reason


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_a_clamp_that_only_prompts_see(family: str) -> None:
    """The code for many tokens bounds the time step from below, that for one does not: where it acts, plain decoding
    has it in the prompt alone."""
    model = clamped_target(family)
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    inputs = prompts_of([CHUNK + 1, 6, 33])
    plain = greedy(model, inputs, 24)
    at_once = model(plain[2:]).logits[0, -25:-1].argmax(-1)
    assert not torch.equal(at_once, plain[2, -24:]), "the bound acts"
    for prompts, chunk in ((inputs, CHUNK), (prompts_of([9]), 1), (prompts_of([5, 4, 3]), 3)):
        settings = {**SHAPES["chain"], "prefill_chunk_size": chunk}
        assert_same_text(model, drafter, prompts, oracle=0, settings=settings, **GREEDY | {"max_new_tokens": 24})


@pytest.mark.parametrize("family", [*SOME, "mamba2"])
def test_the_cache_of_the_last_turn(family: str) -> None:
    """An appended turn goes on where the last one ended; of another history all is read again; the figures say so."""
    model, drafter = pair(family)
    if cache_argument(model) != CACHE_ARGUMENT:
        pytest.skip(f"transformers {transformers.__version__} has another name for such a cache")
    past, read = DynamicCache(config=model.config.get_text_config()), []
    with configured(drafter, **SHAPES["chain"]):
        text = greedy(model, prompts_of([14]), 10, assistant_model=drafter, **{CACHE_ARGUMENT: past})
        for is_edited in (False, True):
            text[0, 3] = (text[0, 3] + is_edited) % VOCABULARY
            text = torch.cat((text, torch.tensor([[7, 8, 9]])), 1)
            inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
            text = greedy(model, inputs, 10, assistant_model=drafter, **{CACHE_ARGUMENT: past})
            assert torch.equal(text, greedy(model, inputs, 10))
            read.append(drafter.stats.prefilled_tokens)
    assert read == [4, text.shape[1] - 10], "three new tokens, and the one no forward has read; then all"
    assert "do not hold for this prompt" in drafter.stats.fallbacks[0]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1"])
def test_ten_turns_of_which_some_rewrite_the_answer_before(family: str) -> None:
    """Of templates that leave out what was thought: at most the last turn is read again, however short its message."""
    model, drafter = pair(family)
    if cache_argument(model) != CACHE_ARGUMENT:
        pytest.skip(f"transformers {transformers.__version__} has another name for such a cache")
    past, dice = DynamicCache(config=model.config.get_text_config()), torch.Generator().manual_seed(0)
    said, most = torch.randint(3, VOCABULARY, (1, 11), generator=dice), 11
    asked, thought = (3, 2, 15, 3, 1, 3, 9, 2, 4, 3), (0, 0, 5, 0, 3, 5, 5, 0, 0, 5)
    with configured(drafter, **SHAPES["chain"]):
        for turn in range(10):
            inputs = {"input_ids": said, "attention_mask": torch.ones_like(said)}
            plain = greedy(model, inputs, 12)
            with oracle_drafts(plain, said.shape[1], seed=turn):
                assert torch.equal(greedy(model, inputs, 12, assistant_model=drafter, **{CACHE_ARGUMENT: past}), plain)
            assert drafter.stats.prefilled_tokens <= most, turn
            answer, message = plain[:, said.shape[1] :], torch.randint(3, VOCABULARY, (1, asked[turn]), generator=dice)
            said = torch.cat((said, answer[:, thought[turn] :], message), 1)
            most = asked[turn] + (BEFORE_THE_ANSWER + answer.shape[1] if thought[turn] else 1)


@pytest.mark.parametrize("family", SOME)
def test_sampled_text_is_plains(family: str) -> None:
    """Under the same seed, by drafts that follow it for a while."""
    for lengths in ([9], [8, 3, 20]):
        assert_plain(family, prompts_of(lengths), SHAPES["chain"], do_sample=True, temperature=0.9, top_k=30, seed=3)


# --- hybrids that see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SEEING_HYBRIDS)
def test_hybrids_that_see_read_text(family: str) -> None:
    for lengths in ([23], [1, 3, 30, 12]):
        inputs = prompts_of(lengths)
        inputs["input_ids"] = inputs["input_ids"] % 80  # no token of a picture
        assert_plain(family, inputs, SHAPES["chain"])


@pytest.mark.parametrize("family", SEEING_HYBRIDS)
def test_hybrids_read_pictures(family: str) -> None:
    """Alone, each picture another text, and in a ragged batch of three, each row its own picture."""
    seeing = SEEING_HYBRIDS[family]
    one, other = (assert_plain(family, seeing.inputs(picture), SHAPES["chain"]) for picture in (1, 2))
    assert not torch.equal(one, other), "or nothing is tested"
    assert_plain(family, seeing.inputs(1, rows=3, padding=[0, 5, 2]), SHAPES["chain"])


def test_a_picture_is_seen_in_the_next_turn() -> None:
    """What the cache holds of it, states and all, is gone on from; what is passed is text."""
    model, drafter = pair("qwen3_5")
    inputs = SEEING_HYBRIDS["qwen3_5"].inputs(1)
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        past = DynamicCache(config=model.config.get_text_config())
        first = greedy(model, inputs, 8, **assistant, **{CACHE_ARGUMENT: past})
        more = torch.cat((first, torch.tensor([[7, 9, 11]])), 1)
        second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        texts.append(greedy(model, second, 8, **assistant, **{CACHE_ARGUMENT: past}))
    assert torch.equal(*texts)
