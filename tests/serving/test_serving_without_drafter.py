"""A server of a target without a drafter: each text is `generate`'s, alone and in a crowd."""

from __future__ import annotations

import pytest
from batches import assert_plain, batch_of

from eagle31_hf import NoDrafter
from eagle31_hf.serving.session import ChatSession
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from loopback import QUESTION, LoadedPair, chat, serving

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
    texts = assert_plain(batch, [(prompt, NEW_TOKENS, how) for prompt in prompts_of(pair) for how in SAMPLINGS])
    assert batch.stats.accepted > 0
    assert sum(text.usage.rounds for text in texts) < len(texts) * NEW_TOKENS
    assert sum(text.usage.cached_tokens for text in texts) > 0, "prompts are begun where the last one began alike"


def test_it_answers_by_the_api(pair: LoadedPair, alone: NoDrafter) -> None:
    with serving(pair._replace(drafter=alone)) as served:
        for _ in range(2):
            answer = chat(served.client(), max_tokens=NEW_TOKENS)
            assert answer.choices[0].message.content == pair.answer(QUESTION, max_new_tokens=NEW_TOKENS)


def test_a_prompt_of_one_token(alone: NoDrafter) -> None:
    batch = batch_of(alone, 2, context=512, chunk=32)
    assert_plain(batch, [([5], NEW_TOKENS, SAMPLINGS[0]), ([7], NEW_TOKENS, SAMPLINGS[1])])


def test_a_chat_goes_on_from_its_cache(pair: LoadedPair, alone: NoDrafter) -> None:
    session = ChatSession(pair.target, alone, pair.tokenizer, max_new_tokens=24)
    for said in ("Book a table for two.", "At seven, please."):
        answer = session.ask(said)
        assert answer.content == pair.text(encode_chat(pair.tokenizer, session.messages[:-1]), max_new_tokens=24)
    first, second = session.answers
    assert second.stats.loop == "own"
    assert second.stats.prefilled_tokens < second.prompt_tokens - first.prompt_tokens
