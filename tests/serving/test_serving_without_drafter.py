"""A server of a target without a drafter: each text is `generate`'s, alone and in a crowd."""

from __future__ import annotations

import pytest
from batches import batch_of, plain, text_of, write_all

from eagle31_hf import NoDrafter
from eagle31_hf.serving.session import ChatSession
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from loopback import LoadedPair, chat, serving

NEW_TOKENS = 40
SAMPLINGS = [Sampling(temperature=0), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_k=20, seed=4)]


@pytest.fixture(scope="module")
def alone(pair: LoadedPair) -> NoDrafter:
    return NoDrafter(pair.target)


def prompts_of(pair: LoadedPair) -> list[list[int]]:
    """Of unlike length; each says what it asks for twice, so that answers have something to quote."""
    told = ("Book a table for two.", "What is the weather like?", "A bus to Portland, please, at noon.")
    return [
        encode_chat(pair.tokenizer, [{"role": "user", "content": f"{each} {each}"[: 30 + 20 * n]}])
        for n, each in enumerate(told)
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thorough(every=2)
def test_texts_are_plains_alone_and_in_a_crowd(rows: int, pair: LoadedPair, alone: NoDrafter) -> None:
    batch = batch_of(alone, rows, context=512, chunk=32)
    asked = [(prompt, sampling) for prompt in prompts_of(pair) for sampling in SAMPLINGS]
    texts = [text_of(prompt, NEW_TOKENS, sampling) for prompt, sampling in asked]
    assert write_all(batch, texts) == [plain(pair.target, prompt, NEW_TOKENS, how) for prompt, how in asked]
    assert batch.stats.accepted > 0
    assert sum(text.usage.rounds for text in texts) < len(texts) * NEW_TOKENS
    assert sum(text.usage.cached_tokens for text in texts) > 0, "prompts are begun where the last one began alike"


def test_it_answers_by_the_api(pair: LoadedPair, alone: NoDrafter) -> None:
    with serving(LoadedPair(pair.target, alone, pair.tokenizer)) as served:
        answer = chat(served.client(), max_tokens=NEW_TOKENS)
        again = chat(served.client(), max_tokens=NEW_TOKENS)
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert answer.choices[0].message.content == pair.answer(
        "What is the weather going to be like in Portland this weekend?", max_new_tokens=NEW_TOKENS
    )


def test_a_prompt_of_one_token(pair: LoadedPair, alone: NoDrafter) -> None:
    batch = batch_of(alone, 2, context=512, chunk=32)
    asked = [([5], SAMPLINGS[0]), ([7], SAMPLINGS[1])]
    assert write_all(batch, [text_of(prompt, NEW_TOKENS, how) for prompt, how in asked]) == [
        plain(pair.target, prompt, NEW_TOKENS, how) for prompt, how in asked
    ]


def test_a_chat_goes_on_from_its_cache(pair: LoadedPair, alone: NoDrafter) -> None:
    session = ChatSession(pair.target, alone, pair.tokenizer, max_new_tokens=24)
    for said in ("Book a table for two.", "At seven, please."):
        answer = session.ask(said)
        assert answer.content == pair.text(encode_chat(pair.tokenizer, session.messages[:-1]), max_new_tokens=24)
    first, second = session.answers
    assert second.stats.loop == "own"
    assert second.stats.prefilled_tokens < second.prompt_tokens - first.prompt_tokens
