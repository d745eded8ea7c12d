"""Texts that come and go in a batch are those of `generate` after `manual_seed` of each one's seed, alone and in a
crowd, drafted by any drafter or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import assert_plain, batch_of, plain, read_in_pieces, text_of, write_all

from eagle31_hf import Eagle31Drafter, NoDrafter
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import Engine
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from families import ENDING, LAST, recurrent_target
from helpers import configured, demo_tokenizer, drafter_of, random_drafter, random_target, target_of
from matrix import pairwise
from mtp_targets import target_with_head

NEW_TOKENS = (24, 10, 30, 18, 40, 12, 21)
SAMPLINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=2, top_p=0.9),
    Sampling(temperature=1.3, seed=3, top_k=30, min_p=0.01),
    Sampling(temperature=0.9, seed=4, repetition_penalty=1.2),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=5),
]
CHAINS = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "acceleration": "eager"}


def headed(family: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        target = target_with_head(family, folder, max_position_embeddings=512)
        return Eagle31Drafter.from_pretrained(folder, target=target)

    return make


def states(family: str) -> Callable[[Path], Any]:
    return lambda folder: random_drafter(recurrent_target(family), aux_layers=[1, 2, 3])


DRAFTERS: dict[str, Callable[[Path], Any]] = {
    "trained": lambda folder: drafter_of("demo-target"),
    "none": lambda folder: NoDrafter(target_of("demo-target")),
    "head beside states": headed("qwen3_5_text"),
    "head of latent attention": headed("glm4_moe_lite"),
    "head that sees a window": headed("mellum"),
    **{f"on {family}": states(family) for family in ("qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1")},
}


@cache
def chats() -> list[list[int]]:
    """Each says what it asks for twice, so that answers have something to quote."""
    said = [f"{messages[0]['content']} {messages[0]['content']}" for messages in CONVERSATIONS[:5]]
    return [encode_chat(demo_tokenizer(), [{"role": "user", "content": each}]) for each in said]


def ids(lengths: tuple[int, ...] = (17, 1, 30, 2, 9, 21, 4)) -> list[list[int]]:
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=dice).tolist() for length in lengths]


@pytest.mark.parametrize(("name", "rows", "schedule"), pairwise([*DRAFTERS], (1, 2, 4), ("constant", "planned", "pid")))
def test_texts_that_come_and_go_are_those_of_generate(name: str, rows: int, schedule: str, tmp_path: Path) -> None:
    drafter = DRAFTERS[name](tmp_path)
    is_demo = name in ("trained", "none")
    prompts = [*chats(), [5], [7]] if is_demo else ids()
    fields = {} if name == "none" else {**CHAINS, "num_assistant_tokens_schedule": schedule}
    with configured(drafter, **fields):
        batch = batch_of(drafter, rows, context=256)
        texts = assert_plain(batch, list(zip(prompts, NEW_TOKENS, SAMPLINGS, strict=True)))
        next_turns = [([*text.tokens, 7, 8], 9, text.request.sampling) for text in reversed(texts)]
        resumed = assert_plain(batch, next_turns)
    assert batch.stats.drafted > 0
    assert any(text.usage.cached_tokens for text in resumed) is (name != "on nemotron_h"), "its prompts are read whole"
    if is_demo:
        assert batch.stats.accepted > 0
        assert sum(text.usage.rounds for text in texts) < sum(NEW_TOKENS)


@pytest.mark.parametrize("name", [*DRAFTERS])
def test_the_same_prompt_again_is_not_read(name: str, tmp_path: Path) -> None:
    """Its end is kept with the row: others begin there while that is written, and once it is parked."""
    drafter, prompt = DRAFTERS[name](tmp_path), ids()[0]
    batch = batch_of(drafter, 3, context=64)
    texts = assert_plain(batch, [(prompt, 12, sampling) for sampling in SAMPLINGS])
    whole = [text.usage.cached_tokens == len(prompt) for text in texts]
    assert not whole[0]
    if name in ("on nemotron_h", "head that sees a window"):  # prompts are read whole; the window has moved on
        assert not any(whole)
    elif batch.cache.has_states:  # a state goes on with its text
        assert whole[1:3] == [True, True]
    else:
        assert all(whole[1:])
        assert_plain(batch, [([*prompt, 7], 9), (prompt[:-1], 9), (prompt, 9)])


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_a_text_at_the_targets_last_position_fails_none_beside_it(family: str) -> None:
    drafter = random_drafter(random_target(ENDING[family]()), aux_layers=[1, 2, 3])
    prompts = ids((9, 23, 6))
    with configured(drafter, num_assistant_tokens=6):
        assert_plain(batch_of(drafter, context=LAST), [(prompt, LAST - len(prompt)) for prompt in prompts])
    engine = Engine(drafter, demo_tokenizer(), EngineSettings(context=512))
    engine.close(0)
    assert engine.settings.context == LAST


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.thorough(every=2)
def test_a_text_takes_as_few_rounds_as_by_generate(temperature: float) -> None:
    """Counted: alone and with three others, by chains of the same length."""
    drafter = drafter_of("demo-target")
    asked = [(chat, 40, Sampling(temperature=temperature, seed=100 + n)) for n, chat in enumerate(chats() * 2)]
    rounds = tokens = 0
    with configured(drafter, **CHAINS, speculation_loop="own"):
        for each in asked:
            plain(drafter.binding.model, *each, assistant_model=drafter)
            rounds, tokens = rounds + drafter.stats.rounds, tokens + drafter.stats.new_tokens - 1
        for rows in (1, 4):
            texts = [text_of(*each) for each in asked]
            write_all(batch_of(drafter, rows, context=512, chunk=32), texts)
            served = sum(text.usage.completion_tokens - 1 for text in texts) / sum(text.usage.rounds for text in texts)
            assert served >= 0.97 * tokens / rounds, rows


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_the_end_of_all_texts_cuts_a_draft(lengths: tuple[int, int]) -> None:
    """A prompt's own scores give the first token, the target's the last one."""
    drafter = drafter_of("demo-target")
    with configured(drafter, num_assistant_tokens=4), torch.inference_mode():
        batch = batch_of(drafter, 2, context=256, chunk=64)
        texts = [text_of(chat, length) for chat, length in zip(chats(), lengths, strict=False)]
        for text in texts:
            read_in_pieces(batch, text, writing=False)
        batch.round()
    assert max(text.usage.drafted for text in texts) == max(lengths) - 2
    assert not batch.stats.skipped_rounds, "where nothing can be drafted, that says nothing of the drafter"


def test_requests_without_a_seed_differ_and_are_drafted_alike() -> None:
    drafter = drafter_of("demo-target")
    with configured(drafter, **CHAINS):
        batch = batch_of(drafter, 4, context=512, chunk=32)
        written = write_all(batch, [text_of(chat, 40, Sampling(temperature=1.0)) for chat in chats() * 2])
    assert batch.stats.acceptance_length > 1.5
    half = len(chats())
    assert all(one != other for one, other in zip(written[:half], written[half:], strict=True))
