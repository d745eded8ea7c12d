"""Texts for a `Batch` without the engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.serving.batch import Batch, Row
from eagle31_hf.serving.rows import TokenChooser, choose_as_generate
from eagle31_hf.serving.text import Request, Sampling, Writer
from helpers import demo_tokenizer

PIECE = 8


def chosen(request: Request, target: Any = None) -> TokenChooser:
    """As `target` would choose, or any whose generation config says nothing."""
    return choose_as_generate(target or _says_nothing(), request, device=torch.device("cpu"))


@cache
def _says_nothing() -> Any:
    with torch.device("meta"):
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        )


def text_of(prompt: list[int], new_tokens: int, sampling: Sampling | None = None) -> Row:
    request = Request(tuple(prompt), new_tokens, sampling or Sampling(temperature=0), ignore_eos=True)
    writer = Writer(demo_tokenizer(), request, frozenset())
    return Row(request, writer, chosen(request))


def plain(target: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    written: Tensor = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return written[0, len(prompt) :].tolist()


def read_in_pieces(batch: Batch, text: Row, *, writing: bool) -> None:
    left = batch.begin(text)
    while left:
        batch.read(min(left, PIECE))
        left -= min(left, PIECE)
        if writing and batch.texts:
            batch.round()
    batch.join()


def write_all(batch: Batch, texts: Sequence[Row]) -> list[list[int]]:
    """Each joins as soon as there is a row for it, while others are written."""
    with torch.inference_mode():
        for text in texts:
            while len(batch.texts) == batch.max_rows:
                batch.round()
            read_in_pieces(batch, text, writing=True)
        while batch.texts:
            batch.round()
    return [text.writer.tokens for text in texts]
