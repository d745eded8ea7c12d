"""A server's rounds on the card that is not there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from fake_card import Counting, Work
from fake_rounds import buffers_of
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.compiled import captured
from eagle31_hf.serving.batch import TextBatch
from eagle31_hf.serving.choosing import TokenChooser
from eagle31_hf.serving.requests import Sampling, TextRequest
from eagle31_hf.serving.written_text import WrittenText

DRAFTED, ACCEPTED = 5, 3


def answer(tensor: Tensor) -> Any:
    """What `accept_drafts` asks for: drafts, parents, and the target's choice, which differs from the third draft."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.dim() < 2:
        return 0.0 if tensor.dim() == 0 else [5] * len(tensor)
    rows, nodes = len(tensor) // 3, tensor.shape[1]
    return [[5] * nodes] * rows + [[0, *range(nodes - 1)]] * rows + [[5, 5] + [7] * (nodes - 2)] * rows


class Writer:
    """Texts that are no text and never end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish, self.remaining = None, 100

    def append(self, tokens: list[int]) -> tuple[int, str]:
        self.tokens += tokens
        return len(tokens), ""


def serve(counting: Counting, drafter: Eagle31Drafter, rows: int, rounds: int) -> tuple[list[Work], list[str]]:
    """Rounds of greedy texts, no two of one length; work of each, and why something was not captured."""
    drafter.generation_config.num_assistant_tokens = DRAFTED
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    with (
        mock.patch.dict(captured.CAPTURES, {"cuda": counting.capture}),
        drafter.require_binding().masked_attention(),
        torch.no_grad(),
    ):
        batch = TextBatch(drafter, max_rows=rows, context=4096, prefill_chunk=512)
        for row in range(rows):
            read(batch, [5] * (1100 + 10 * row))
        works = []
        for _ in range(rounds):
            counting.follow(buffers_of(batch.cache))
            batch.round()
            works.append(counting.work)
    assert [len(text.writer.tokens) for text in batch.texts] == [ACCEPTED * rounds] * rows
    return works, batch.stats.fallbacks


def read(batch: TextBatch, prompt: list[int]) -> None:
    request = TextRequest(tuple(prompt), 100, Sampling(temperature=0), ignore_eos=True)
    writer: Any = Writer()
    left = batch.begin(WrittenText(request, writer, TokenChooser(request.sampling, len(prompt))))
    while left > 0:
        batch.read(512)
        left -= 512
    batch.join()
