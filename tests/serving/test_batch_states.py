"""Texts that come and go on a target whose layers keep states: each is plain decoding's, read in pieces or resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.serving.batch import TextBatch, WrittenText
from eagle31_hf.serving.choosing import TokenChooser
from eagle31_hf.serving.requests import Sampling, TextRequest
from eagle31_hf.serving.text import TextWriter
from families import recurrent_target
from helpers import demo_tokenizer, random_drafter

ROWS, PIECE = 3, 8


def text_of(prompt: list[int], new_tokens: int) -> WrittenText:
    request = TextRequest(tuple(prompt), new_tokens, Sampling(temperature=0), ignore_eos=True)
    writer = TextWriter(demo_tokenizer(), request, frozenset())
    return WrittenText(request, writer, TokenChooser(request.sampling, len(prompt)))


def plain(target: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    written: Tensor = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return written[0, len(prompt) :].tolist()


def read_in_pieces(batch: TextBatch, text: WrittenText, *, writing: bool) -> None:
    left = batch.begin(text)
    while left:
        batch.read(min(left, PIECE))
        left -= min(left, PIECE)
        if writing and batch.texts:
            batch.round()
    batch.join()


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba", "lfm2", "falcon_h1"])
def test_texts_are_plains(family: str) -> None:
    target = recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    dice = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 96, (length,), generator=dice).tolist() for length in (17, 1, 30, 2, 9, 12, 25, 4)]
    wanted = {tuple(prompt): plain(target, prompt, 10 + number) for number, prompt in enumerate(prompts)}
    texts = [text_of(prompt, 10 + number) for number, prompt in enumerate(prompts)]
    with torch.inference_mode():
        batch = TextBatch(drafter, max_rows=ROWS, context=64, prefill_chunk=16)
        for text in texts:
            while len(batch.texts) == ROWS:
                batch.round()
            read_in_pieces(batch, text, writing=True)
        while batch.texts:
            batch.round()
    for text in texts:
        assert text.writer.tokens == wanted[tuple(text.request.prompt)], text.request.prompt


def test_a_turn_is_resumed_where_the_last_one_ended_and_nowhere_else() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    prompt = list(range(5, 25))
    with torch.inference_mode():
        batch = TextBatch(drafter, max_rows=ROWS, context=128, prefill_chunk=16)

        def write(prompt: list[int]) -> WrittenText:
            text = text_of(prompt, 12)
            read_in_pieces(batch, text, writing=False)
            while batch.texts:
                batch.round()
            return text

        first = write(prompt)
        asked = [*prompt, *first.writer.tokens, 7, 8, 9]
        second = write(asked)
        assert second.usage.cached_tokens == len(prompt) + 12 - 1
        third = write([*asked[:22], 40, 41, 42])
        assert third.usage.cached_tokens == 0, "a state cannot go back"
    for text in (first, second, third):
        assert text.writer.tokens == plain(target, list(text.request.prompt), 12)
