"""The contract for targets whose layers keep states, recurrent or of convolutions: what they have of their own.

Targets are tiny and random, and remember long (`recurrent_target`), so that a state that is not rolled back shows in
the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from agreement import SHAPES, pair
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.targets.binding import cache_argument
from families import SEEING_HYBRIDS, clamped_target
from helpers import (
    GREEDY,
    VOCABULARY,
    assert_same_text,
    configured,
    oracle_drafts,
    prompts_of,
    random_drafter,
    switching_policies,
)

pytestmark = pytest.mark.contract

CHUNK = 16
SOME = ("qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "falcon_h1")


def greedy(model: Any, inputs: dict[str, Any], new_tokens: int = 16, **kwargs: Any) -> Any:
    return model.generate(**inputs, **{**GREEDY, "max_new_tokens": new_tokens}, **kwargs)


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
    free = greedy(model, inputs, 20)
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
    plain = greedy(model, inputs, 24)
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
        past = {CACHE_ARGUMENT: DynamicCache(config=model.config.get_text_config())}
        inputs = prompts_of([length])
        with configured(drafter, **SHAPES["chain"], prefill_chunk_size=CHUNK):
            for _ in range(3):
                text = greedy(model, inputs, 10, assistant_model=drafter, **past)
                assert torch.equal(text, greedy(model, inputs, 10))
                assert drafter.stats.prefilled_tokens == inputs["input_ids"].shape[1]
                inputs = whole(text, [7, 8, 9])


@pytest.mark.parametrize("family", [*SOME, "mamba2"])
def test_the_cache_of_the_last_turn(family: str) -> None:
    """An appended turn goes on where the last one ended; of another history all is read again; the figures say so."""
    model, drafter, past = carried_pair(family)
    text, read = greedy(model, prompts_of([14]), 10, assistant_model=drafter, **past), []
    for is_edited in (False, True):
        text[0, 3] = (text[0, 3] + is_edited) % VOCABULARY
        inputs = whole(text, [7, 8, 9])
        text = greedy(model, inputs, 10, assistant_model=drafter, **past)
        assert torch.equal(text, greedy(model, inputs, 10))
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
            plain = greedy(model, inputs, 12)
            with oracle_drafts(plain, said.shape[1], seed=turn):
                assert torch.equal(greedy(model, inputs, 12, assistant_model=drafter, **past), plain)
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
        first = greedy(model, SEEING_HYBRIDS["qwen3_5"].inputs(1), 8, **how)
        texts.append(greedy(model, whole(first, [7, 9, 11]), 8, **how))
    assert torch.equal(*texts)
