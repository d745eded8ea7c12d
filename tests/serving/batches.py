"""Texts for a `Batch` without the engine around it, and what `generate` writes in their place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers as hf

from eagle31_hf.serving.batch import Batch, Row
from eagle31_hf.serving.rows import choose_as_generate
from eagle31_hf.serving.text import Request, Sampling, Writer
from helpers import demo_tokenizer, seeded

PIECE = 8
GREEDY = Sampling(temperature=0)


@cache
def _says_nothing() -> Any:
    with torch.device("meta"):
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        )


def text_of(prompt: Sequence[int], new_tokens: int, sampling: Sampling = GREEDY, target: Any = None) -> Row:
    """A text that does not end by itself, chosen as by `target`, or by any whose generation config says nothing."""
    request = Request(tuple(prompt), new_tokens, sampling, ignore_eos=True)
    chooser = choose_as_generate(target or _says_nothing(), request, device=torch.device("cpu"))
    return Row(request, Writer(demo_tokenizer(), request, frozenset()), chooser)


def plain(target: Any, prompt: Sequence[int], new_tokens: int, sampling: Sampling = GREEDY, **kwargs: Any) -> list[int]:
    """New tokens of `generate`, of the target alone unless there is an assistant among `kwargs`."""
    ids, names = torch.tensor([list(prompt)]), ["repetition_penalty"]
    names += ["temperature", "top_k", "top_p", "min_p"] if sampling.temperature else []
    kwargs |= {name: value for name in names if (value := getattr(sampling, name)) is not None}
    with seeded(sampling.seed or 0):
        written = target.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, max_new_tokens=new_tokens,
            do_sample=sampling.temperature != 0, **kwargs,
        )  # fmt: skip
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
