"""Texts that come and go on a target whose layers keep states: each is plain decoding's, read in pieces or resumed."""

from __future__ import annotations

import pytest
import torch
from batches import plain, read_in_pieces, text_of, write_all

from eagle31_hf.serving.batch import TextBatch, WrittenText
from families import recurrent_target
from helpers import random_drafter

ROWS = 3


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba", "lfm2", "falcon_h1"])
def test_texts_are_plains(family: str) -> None:
    target = recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    dice = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 96, (length,), generator=dice).tolist() for length in (17, 1, 30, 2, 9, 12, 25, 4)]
    wanted = {tuple(prompt): plain(target, prompt, 10 + number) for number, prompt in enumerate(prompts)}
    texts = [text_of(prompt, 10 + number) for number, prompt in enumerate(prompts)]
    write_all(TextBatch(drafter, max_rows=ROWS, context=64, prefill_chunk=16), texts)
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
