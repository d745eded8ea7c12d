"""A request's seed writes the text that plain `generate` writes after `torch.manual_seed` of it, with as few passes as
`generate` with the drafter takes."""

from __future__ import annotations

import pytest
from batches import assert_plain, batch_of, plain, text_of, write_all

from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.serving.batch import Batch
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from helpers import configured

LENGTH = 5
CHAINS = {"num_assistant_tokens": LENGTH, "num_assistant_tokens_schedule": "constant", "acceleration": "eager"}
NEW_TOKENS = 40


def prompt_of(pair, number: int) -> list[int]:
    return encode_chat(pair.tokenizer, CONVERSATIONS[number % len(CONVERSATIONS)][:1])


def write(pair, samplings: list[Sampling], *, rows: int) -> tuple[list[ServedText], Batch]:
    """One text for each, in a batch of so many rows that others join as there is room."""
    batch = batch_of(pair.drafter, rows, context=512, chunk=32)
    texts = [text_of(prompt_of(pair, n), NEW_TOKENS, each) for n, each in enumerate(samplings)]
    write_all(batch, texts)
    return texts, batch


MIXED = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=2, top_p=0.9),
    Sampling(temperature=1.3, seed=3, top_k=30, min_p=0.01),
    Sampling(temperature=0.9, seed=4, repetition_penalty=1.2),
    Sampling(temperature=1.0, seed=5),
]


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.thorough(every=4)
def test_texts_in_a_crowd_are_those_of_generate(pair, rows: int) -> None:
    with configured(pair.drafter, **CHAINS):
        batch = batch_of(pair.drafter, rows, context=512, chunk=32)
        assert_plain(batch, [(prompt_of(pair, number), NEW_TOKENS, each) for number, each in enumerate(MIXED)])
    assert batch.stats.acceptance_length > 1.5, "drafts were accepted"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.thorough(every=2)
def test_a_text_takes_as_few_rounds_as_by_generate(pair, temperature: float) -> None:
    """Counted: alone and with three others, by chains of the same length."""
    samplings = [Sampling(temperature=temperature, seed=100 + number) for number in range(2 * len(CONVERSATIONS))]
    rounds = tokens = 0
    with configured(pair.drafter, **CHAINS, speculation_loop="own"):
        for number, sampling in enumerate(samplings):
            plain(pair.target, prompt_of(pair, number), NEW_TOKENS, sampling, assistant_model=pair.drafter)
            rounds, tokens = rounds + pair.drafter.stats.rounds, tokens + pair.drafter.stats.new_tokens - 1
        for rows in (1, 4):
            texts, _ = write(pair, samplings, rows=rows)
            served = sum(text.usage.completion_tokens for text in texts) / sum(text.usage.rounds for text in texts)
            assert served >= 0.97 * tokens / rounds, rows


def test_requests_without_a_seed_differ_and_are_drafted_alike(pair) -> None:
    with configured(pair.drafter, **CHAINS):
        texts, batch = write(pair, [Sampling(temperature=1.0)] * 2 * len(CONVERSATIONS), rows=4)
    assert batch.stats.acceptance_length > 1.5
    first, again = texts[: len(CONVERSATIONS)], texts[len(CONVERSATIONS) :]
    assert all(one.writer.tokens != other.writer.tokens for one, other in zip(first, again, strict=True))
