"""Texts for a `Batch` without the engine around it, and what `generate` writes in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagle31_hf.serving.batch import Batch, EngineSettings
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.text import Request, Sampling
from families import recurrent_target
from helpers import CONFIGS, demo_tokenizer, random_drafter, seeded, target_of

PIECE = 8
GREEDY = Sampling(temperature=0)


def batch_of(drafter: Any, rows: int = 3, *, context: int = 96, chunk: int = 16) -> Batch:
    return Batch(drafter, demo_tokenizer(), EngineSettings(max_rows=rows, context=context, prefill_chunk=chunk))


def drafter_on(family: str, **overrides: Any) -> Any:
    """An untrained drafter on the target of a family."""
    target = target_of(family) if family in CONFIGS else recurrent_target(family)
    return random_drafter(target, aux_layers=[1, 2, 3], **overrides)


def text_of(prompt: Sequence[int], new_tokens: int, sampling: Sampling = GREEDY) -> ServedText:
    """A text that does not end by itself."""
    return ServedText(Request(tuple(prompt), new_tokens, sampling), lambda event: None)


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


def read_in_pieces(batch: Batch, text: ServedText, *, writing: bool) -> None:
    batch.begin(text)
    while batch.to_read:
        batch.read(min(batch.to_read, PIECE))
        if writing and batch.texts:
            batch.round()
    batch.join()


def assert_plain(batch: Batch, asked: Sequence[tuple[Any, ...]]) -> list[ServedText]:
    """Texts of these `(prompt, new_tokens)`, or with a sampling, are those of `generate`."""
    texts = [text_of(*each) for each in asked]
    assert write_all(batch, texts) == [plain(batch.binding.model, *each) for each in asked]
    return texts


def write_all(batch: Batch, texts: Sequence[ServedText]) -> list[list[int]]:
    """Each joins as soon as there is a row for it, while others are written."""
    with torch.inference_mode():
        for text in texts:
            while len(batch.texts) == batch.settings.max_rows:
                batch.round()
            read_in_pieces(batch, text, writing=True)
        while batch.texts:
            batch.round()
    return [text.writer.tokens for text in texts]
