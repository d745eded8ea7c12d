"""Targets that draft by a head of their own, served: each text is the one that `generate` writes alone."""

from __future__ import annotations

import pytest
import torch
from batches import assert_plain, batch_of
from transformers import AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path
from eagle31_hf.sampling.logits_processing import sampling_options
from eagle31_hf.serving.session import ChatSession
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from helpers import configured, seeded
from loopback import LoadedPair
from mtp_targets import target_with_head

SERVED = ("qwen3_5_text", "glm4_moe_lite", "mellum")
"""One whose other layers keep states, one of latent attention, one whose head sees a window."""
LENGTHS = (5, 21, 11, 8, 17)
NEW_TOKENS = (24, 10, 30, 18, 12)
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, seed=2, top_k=20),
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3, repetition_penalty=1.2),
]


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = target_with_head(request.param, folder, vocab_size=len(tokenizer), max_position_embeddings=512)
    return LoadedPair(target, Eagle31Drafter.from_pretrained(folder, target=target), tokenizer)


def prompt_of(number: int) -> list[int]:
    dice = torch.Generator().manual_seed(number)
    return torch.randint(10, 4000, (LENGTHS[number],), generator=dice).tolist()


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["constant", "planned"])
def test_texts_that_come_and_go_are_those_of_generate(pair, rows: int, schedule: str) -> None:
    asked = [(prompt_of(number), *each) for number, each in enumerate(zip(NEW_TOKENS, SAMPLINGS, strict=True))]
    with configured(pair.drafter, num_assistant_tokens=3, num_assistant_tokens_schedule=schedule):
        batch = batch_of(pair.drafter, rows, context=128, chunk=8)
        assert_plain(batch, asked)
    assert batch.stats.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_carried_turns_are_those_of_the_whole_conversation(pair, temperature: float) -> None:
    """Two turns, one undone, another in its place: what is read again is only what is new."""
    session = ChatSession(
        pair.target, pair.drafter, pair.tokenizer, max_new_tokens=12, temperature=temperature, context=500
    )
    with configured(pair.drafter, num_assistant_tokens=3, num_assistant_tokens_schedule="constant"):
        for turn in ("Hi.", "Is it far?", None, "Which way?"):
            if turn is None:
                session.undo()
                continue
            with seeded(7):
                answer = session.ask(turn)
            assert answer.content == whole(pair, session, temperature)
            assert answer.stats.loop == "own", answer.stats.reason
            assert answer.stats.drafted > 0
    first, last = session.answers[0], session.answers[-1]
    assert first.stats.prefilled_tokens == first.prompt_tokens
    if pair.drafter.config.family == "glm4_moe_lite":  # windows and states cannot be cut back to where texts part
        assert last.stats.prefilled_tokens <= last.prompt_tokens - first.prompt_tokens


def whole(pair: LoadedPair, session: ChatSession, temperature: float) -> str:
    """What the target alone answers to the conversation up to its last message."""
    ids = torch.tensor([encode_chat(pair.tokenizer, session.messages[:-1])])
    with seeded(7):
        out = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, **sampling_options(temperature)
        )
    return pair.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
