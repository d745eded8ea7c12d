"""The contract for every family that a loop may meet: plain's text, or a refusal that says why.

Targets are tiny and random; those whose layers keep states, recurrent or of convolutions, remember long
(`recurrent_target`), so that a state that is not rolled back shows in the text. What a target sees (a picture) must
change its text, or nothing would be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from agreement import LOOPS, SEEING, SHAPES, pair
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.targets.binding import cache_argument
from families import RECURRENT_FAMILIES, SEEING_HYBRIDS, TEXT_FAMILIES, clamped_target
from helpers import (
    VOCABULARY,
    assert_same_text,
    assert_same_turns,
    configured,
    oracle_drafts,
    prompts_of,
    random_drafter,
    switching_policies,
    write,
)
from matrix import pairwise

pytestmark = pytest.mark.contract

PLAIN = dict.fromkeys(("bloom", "gpt_neo"), "self-test") | dict.fromkeys(
    ("jamba", "zaya"), "code that cannot be record"
)
"""Families whose layers take no mask of one's own, and those whose recurrence cannot be recorded; why they are left."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 30},
}
PROMPTS = ("one", "ragged", "a picture", "ragged pictures")


def inputs_of(family: str, prompt: str) -> dict[str, Tensor]:
    """Across windows of eight. Of the ragged prompts one is a single token, one shorter than convolutions look."""
    if prompt == "a picture":
        return SEEING[family].inputs(1)
    if prompt == "ragged pictures":
        return SEEING[family].inputs(1, rows=3, padding=[0, 5, 2])
    inputs = prompts_of([23] if prompt == "one" else [1, 3, 30, 12])
    if family in SEEING:
        inputs["input_ids"] = inputs["input_ids"] % 80  # no token of a picture
    return inputs


def can_be_read(family: str, prompt: str, *_: str) -> bool:
    return family in SEEING or "picture" not in prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prompt", "loop", "way"),
    pairwise(
        [*TEXT_FAMILIES, *RECURRENT_FAMILIES, *SEEING], PROMPTS, [*LOOPS], [*WAYS], allowed=can_be_read
    ),
)  # fmt: skip
def test_text_is_plains(family: str, prompt: str, loop: str, way: str) -> None:
    """Where layers keep states, a tree that was asked for is drafted as a chain."""
    target, drafter = pair(family)
    why = PLAIN.get(family, "")
    text = assert_same_text(
        target, drafter, inputs_of(family, prompt), loop="plain" if why else "own", why=why, oracle=1,
        settings=LOOPS[loop], **WAYS[way],
    )  # fmt: skip
    told = any("trees are drafted as chains" in fallback for fallback in drafter.stats.fallbacks)
    assert told == ("tree" in loop and drafter.binding.has_states and not why)
    assert prompt != "ragged pictures" or not torch.equal(text[0], text[1]), "each row sees its own picture"


@pytest.mark.parametrize("family", SEEING)
def test_a_picture_changes_the_text(family: str) -> None:
    texts = [assert_same_text(*pair(family), SEEING[family].inputs(picture), oracle=1) for picture in (1, 2)]
    assert not torch.equal(*texts), "or nothing is tested"


# --- layers that keep states ------------------------------------------------------------------------------------------

CHUNK = 16
SOME = ("qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "falcon_h1")


@pytest.mark.parametrize("family", SOME)
def test_rounds_of_changing_length(family: str) -> None:
    """Drafts of every length and none, in turn."""
    with switching_policies() as policies:
        inputs = prompts_of([9, 1, 17, 4])
        assert_same_text(*pair(family), inputs, settings=SHAPES["tree"], oracle=0, max_new_tokens=40)
    assert policies[0].kinds > {"none", "cut"}


@pytest.mark.parametrize("family", SOME)
def test_rows_that_have_ended(family: str) -> None:
    """A stop token inside an accepted block leaves keys and states alike, and rows that go on as they were."""
    model, drafter = pair(family)
    inputs = prompts_of([5, 11, 2, 20])
    free = write(model, inputs, max_new_tokens=20)
    ends = sorted({int(free[row, 20 + 3 * row + 2]) for row in range(3)})
    assert_same_text(model, drafter, inputs, oracle=4, max_new_tokens=20, eos_token_id=ends)


@pytest.mark.parametrize(
    ("lengths", "chunk", "loop"), [([23, 3], 9, "own"), ([9], 4, "plain"), ([5, 4, 3], 2, "plain")]
)
def test_chunks_of_the_call(lengths: list[int], chunk: int, loop: str) -> None:
    """Plain decoding reads a last chunk of one token by the code for one."""
    model = clamped_target("nemotron_h")
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    why = "leaves a single token" if loop == "plain" else ""
    assert_same_text(model, drafter, prompts_of(lengths), oracle=0, loop=loop, why=why, prefill_chunk_size=chunk)


@pytest.mark.parametrize("family", [*SOME, "zamba2"])
def test_chunks_of_the_drafter(family: str) -> None:
    """The prompt's text is that of a prompt read at once, with a token left over, too."""
    settings = {"prefill_chunk_size": CHUNK}
    for lengths in ([CHUNK + 1], [CHUNK + 1, 2 * CHUNK + 1, 3, 40]):
        assert_same_text(*pair(family), prompts_of(lengths), settings=settings, oracle=len(lengths), max_new_tokens=8)


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_a_clamp_that_only_prompts_see(family: str) -> None:
    """The code for many tokens bounds the time step from below, that for one does not: where it acts, plain decoding
    has it in the prompt alone."""
    model = clamped_target(family)
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    inputs = prompts_of([CHUNK + 1, 6, 33])
    plain = write(model, inputs, max_new_tokens=24)
    at_once = model(plain[2:]).logits[0, -25:-1].argmax(-1)
    assert not torch.equal(at_once, plain[2, -24:]), "the bound acts"
    for prompts, chunk in ((inputs, CHUNK), (prompts_of([9]), 1), (prompts_of([5, 4, 3]), 3)):
        assert_same_text(model, drafter, prompts, oracle=0, settings={"prefill_chunk_size": chunk}, max_new_tokens=24)


# --- the next turn ----------------------------------------------------------------------------------------------------


def carried_pair(family: str) -> tuple[Any, Any, dict[str, Any]]:
    """With an empty cache that is to be carried, by its name."""
    model, drafter = pair(family)
    if cache_argument(model) != CACHE_ARGUMENT:
        pytest.skip(f"transformers {transformers.__version__} has another name for such a cache")
    return model, drafter, {CACHE_ARGUMENT: DynamicCache(config=model.config.get_text_config())}


def whole(text: Tensor, more: Sequence[int] = ()) -> dict[str, Tensor]:
    """A text `(1, T)` and more tokens as `generate` wants them."""
    ids = torch.cat((text, torch.tensor([more], dtype=torch.long)), 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_the_cache_of_the_last_turn_where_prompts_are_clamped(family: str) -> None:
    """An answer in a prompt is clamped, too: all is read again, and no token by itself."""
    model = clamped_target(family)
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    for length in (14, 9, CHUNK + 9):
        with configured(drafter, **SHAPES["chain"], prefill_chunk_size=CHUNK):
            read = assert_same_turns(model, drafter, prompts_of([length]), 3, max_new_tokens=10)
        assert read == [length, length + 13, length + 26]


@pytest.mark.parametrize("family", [*SOME, "mamba2"])
def test_the_cache_of_the_last_turn(family: str) -> None:
    """An appended turn goes on where the last one ended; of another history all is read again; the figures say so."""
    model, drafter, past = carried_pair(family)
    text, read = write(model, prompts_of([14]), max_new_tokens=10, assistant_model=drafter, **past), []
    for is_edited in (False, True):
        text[0, 3] = (text[0, 3] + is_edited) % VOCABULARY
        inputs = whole(text, [7, 8, 9])
        text = write(model, inputs, max_new_tokens=10, assistant_model=drafter, **past)
        assert torch.equal(text, write(model, inputs, max_new_tokens=10))
        read.append(drafter.stats.prefilled_tokens)
    rest = 14 + 10 + 3 if drafter.binding.bounds_prompts else 1 + 3
    assert read == [rest, text.shape[1] - 10], "three new tokens, and the one no forward has read; then all"
    assert "do not hold for this prompt" in drafter.stats.fallbacks[0]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1"])
def test_ten_turns_of_which_some_rewrite_the_answer_before(family: str) -> None:
    """Of templates that leave out what was thought: then all is read again, else the new message, however short."""
    model, drafter, past = carried_pair(family)
    dice, unread = torch.Generator().manual_seed(0), 11
    said = torch.randint(3, VOCABULARY, (1, 11), generator=dice)
    asked, thought = (3, 2, 15, 3, 1, 3, 9, 2, 4, 3), (0, 0, 5, 0, 3, 5, 5, 0, 0, 5)
    with configured(drafter, **SHAPES["chain"]):
        for turn in range(10):
            inputs = whole(said)
            plain = write(model, inputs, max_new_tokens=12)
            with oracle_drafts(plain, said.shape[1], seed=turn):
                assert torch.equal(write(model, inputs, max_new_tokens=12, assistant_model=drafter, **past), plain)
            assert drafter.stats.prefilled_tokens == unread, turn
            answer, message = plain[:, said.shape[1] :], torch.randint(3, VOCABULARY, (1, asked[turn]), generator=dice)
            said = torch.cat((said, answer[:, thought[turn] :], message), 1)
            is_read_again = thought[turn] or drafter.binding.bounds_prompts
            unread = said.shape[1] if is_read_again else asked[turn] + 1


def test_a_picture_is_seen_in_the_next_turn() -> None:
    """What the cache holds of it, states and all, is gone on from; what is passed is text."""
    texts = []
    for by_drafter in (False, True):
        model, drafter, past = carried_pair("qwen3_5")
        how = {**past, "assistant_model": drafter if by_drafter else None}
        first = write(model, SEEING_HYBRIDS["qwen3_5"].inputs(1), max_new_tokens=8, **how)
        texts.append(write(model, whole(first, [7, 9, 11]), max_new_tokens=8, **how))
    assert torch.equal(*texts)
