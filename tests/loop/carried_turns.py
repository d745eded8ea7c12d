"""Turns of a dialogue, plain and over a carried cache, and what the target reads of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from helpers import drafter_of, prompts_for, random_prompts, target_of

FULL, SLIDING = ("llama",), ("mistral", "gemma3")
NEW = 10


def prompt_of(name: str, seed: int = 3) -> Tensor:
    return torch.tensor([prompts_for(name, 1, seed)[0]])


def new_cache(name: str) -> DynamicCache:
    return DynamicCache(config=target_of(name).config)


def plain(name: str, text: Tensor, **kwargs: Any) -> Tensor:
    # Random text has pad ids in it; without a mask, `generate` would take them for padding.
    defaults = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(text)}
    return target_of(name).generate(text, **{**defaults, **kwargs})


def ours(name: str, text: Tensor, cache: DynamicCache | None, **kwargs: Any) -> Any:
    return plain(name, text, assistant_model=drafter_of(name), **{CACHE_ARGUMENT: cache}, **kwargs)


def users_turn(text: Tensor, seed: int = 0, tokens: int = 5) -> Tensor:
    """`text` `(B, T)` with some tokens of the user's, the same in every row."""
    dice = torch.Generator().manual_seed(seed)
    turn = torch.randint(3, 90, (1, tokens), generator=dice).expand(len(text), -1)
    return torch.cat((text, turn), dim=1)


@contextmanager
def target_positions(name: str) -> Iterator[list[int]]:
    """Positions per row of each target forward, as its last layer sees them."""
    drafter_of(name)  # attaching it takes a forward, too
    counts: list[int] = []

    def count(_module: Any, args: tuple, kwargs: dict) -> None:
        counts.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    hook = target_of(name).get_decoder().layers[-1].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def assert_reads(positions: int, name: str, text: Tensor, cache: DynamicCache | None, **kwargs: Any) -> Tensor:
    """The turn is what plain decoding writes without a cache, and the target has read so many positions of `text`."""
    truth = plain(name, text, **kwargs)
    with target_positions(name) as counts:
        written = ours(name, text, cache, **kwargs)
    assert torch.equal(written, truth)
    assert counts[0] == positions
    return written


def assert_same_contents(cache: DynamicCache, other: DynamicCache) -> None:
    assert cache.get_seq_length() == other.get_seq_length()
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        assert type(layer) is type(twin)
        torch.testing.assert_close(layer.keys, twin.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.values, twin.values, rtol=1e-3, atol=1e-4)


def after_one_turn(name: str) -> tuple[Tensor, DynamicCache]:
    cache = new_cache(name)
    return ours(name, prompt_of(name), cache), cache


def equal_rows(name: str) -> Tensor:
    return torch.tensor([(prompt * 9)[:9] for prompt in random_prompts(3, seed=1)])
