"""A running batch drafts what pays for so many rows, and rests where nothing does; its texts are the target's own."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of, read_in_pieces, text_of, write_all

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from helpers import configured


def ids_of(pair, number: int) -> list[int]:
    return encode_chat(pair.tokenizer, CONVERSATIONS[number % len(CONVERSATIONS)][:1])


@pytest.fixture(scope="module")
def untrained(pair):
    drafter = Eagle31Drafter.from_pretrained(pair.drafter.name_or_path, target=pair.target)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    return drafter


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=0.8, seed=5)], ids=["greedy", "drawn"]
)
@torch.inference_mode()
@pytest.mark.thorough
def test_texts_that_come_and_go_while_the_drafter_rests_are_its_own(pair, untrained, sampling: Sampling) -> None:
    """With a drafter that is never right, rows joining, leaving and beginning as others did: as without any drafts."""
    lengths, texts = (90, 30, 60, 20, 50), {}
    for schedule, depth in (("planned", 5), ("constant", 1)):
        with configured(untrained, num_assistant_tokens=depth, num_assistant_tokens_schedule=schedule):
            batch = batch_of(untrained, 2, context=256, chunk=32)
            texts[schedule] = []
            for number, length in enumerate(lengths):
                texts[schedule].append(text_of(ids_of(pair, number // 2), length, sampling))
            write_all(batch, texts[schedule])
        if schedule == "planned":
            assert batch.stats.skipped_rounds > batch.stats.passes / 2
            assert any(text.usage.cached_tokens for text in texts[schedule]), "a row was begun with another's caches"
    assert [text.tokens for text in texts["planned"]] == [text.tokens for text in texts["constant"]]


@torch.inference_mode()
def test_drafts_that_are_right_go_on(pair) -> None:
    with configured(pair.drafter, num_assistant_tokens=5):
        batch = batch_of(pair.drafter, 2, context=256, chunk=64)
        write_all(batch, [text_of(ids_of(pair, number), 60) for number in range(2)])
    assert batch.stats.skipped_rounds == 0
    assert batch.stats.acceptance_length > 2


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_the_end_of_all_texts_cuts_a_draft(pair, lengths: tuple[int, int]) -> None:
    """A prompt's own scores give the first token, the target's the last one."""
    with configured(pair.drafter, num_assistant_tokens=4):
        batch = batch_of(pair.drafter, 2, context=256, chunk=64)
        texts = [text_of(ids_of(pair, number), length) for number, length in enumerate(lengths)]
        with torch.inference_mode():
            for text in texts:
                read_in_pieces(batch, text, writing=False)
            batch.round()
    assert max(text.usage.drafted for text in texts) == max(lengths) - 2
    assert not batch.stats.skipped_rounds, "where nothing can be drafted, that says nothing of the drafter"
