"""A server's rounds on the card that is not there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from fake_card import CARD, Counting, Work
from fake_rounds import ACCEPTED, buffers_of

from eagle31_hf import Eagle31Drafter
from eagle31_hf.graphs import captured, seen
from eagle31_hf.sampling.draw import FreshNoise
from eagle31_hf.serving.batch import Batch, EngineSettings
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.text import Request, Sampling
from helpers import demo_tokenizer

DRAFTED = 5


class Writer:
    """Texts that are no text and never end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish, self.remaining = None, 100

    def append(self, tokens: list[int]) -> tuple[int, str]:
        self.tokens += tokens
        return len(tokens), ""


GREEDY = Sampling(temperature=0)


def serve(
    counting: Counting, drafter: Eagle31Drafter, rows: int, rounds: int, sampling: Sampling = GREEDY
) -> tuple[list[Work], list[str]]:
    """Rounds of texts, no two of one length; work of each, and why something was not captured."""
    drafter.generation_config.num_assistant_tokens = DRAFTED
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    with (
        mock.patch.dict(captured.CAPTURES, {"cuda": counting.capture}),
        mock.patch.object(seen, "open_modes", list),  # those that count: graphs would not run another's
        drafter.binding.masked_attention(),
        torch.no_grad(),
    ):
        batch = Batch(drafter, demo_tokenizer(), EngineSettings(max_rows=rows, prefill_chunk=512))
        for row in range(rows):
            read(batch, [5] * (1100 + 10 * row), sampling)
        works = []
        for _ in range(rounds):
            counting.follow(buffers_of(batch.cache))
            batch.round()
            works.append(counting.work)
    # The first token comes with the prompt.
    assert [len(text.writer.tokens) for text in batch.texts] == [1 + ACCEPTED * rounds] * rows
    return works, batch.stats.fallbacks


def read(batch: Batch, prompt: list[int], sampling: Sampling) -> None:
    text: Any = ServedText(Request(tuple(prompt), 100, sampling), lambda event: None)
    batch.begin(text)
    text.writer = Writer()
    text.chooser._noise = FreshNoise(batch.binding.text_config.vocab_size, CARD)  # a card's generators are not there
    while batch.to_read:
        batch.read(min(batch.to_read, 512))
    batch.join()
