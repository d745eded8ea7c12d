"""Keys and values in 8 bits: drafting leaves the text as token-by-token decoding writes it over them.

What such a cache holds: `test_cache_histories`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma4TextConfig

from eagle31_hf.drafter.assistant import NoDrafter
from families import GEMMA_4
from helpers import CONFIGS, configured, drafter_of, left_padded, oracle_drafts, prompts_for, target_of, write
from matrix import WHOLE, pairwise

NEW_TOKENS = 20
SHAPES = {
    "chain": {"draft_top_k": 1, "num_assistant_tokens": 4},
    "tree": {"draft_top_k": 2, "num_assistant_tokens": 3, "draft_tree_size": 7},
}


@cache
def token_by_token(name: str, prompt: tuple[int, ...], kind: str, new_tokens: int = NEW_TOKENS) -> Tensor:
    """Logits `(n, V)` after each token of the greedy text that our loop writes over such a cache without a draft."""
    alone = NoDrafter(target_of(name))
    how = {"max_new_tokens": new_tokens, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with configured(alone, cache_type=kind, num_assistant_tokens_schedule="constant"):
        ids = torch.tensor([prompt])
        written = target_of(name).generate(ids, assistant_model=alone, prefill_chunk_size=1, **how)
    assert (alone.stats.loop, alone.stats.cache_type, alone.stats.drafted) == ("own", kind, 0)
    alone.detach()
    return torch.cat(written.logits)


def plain_text(name: str, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """New tokens `(B, n)` of token-by-token decoding, and the logits `(B, n, V)` behind them."""
    logits = torch.stack([token_by_token(name, tuple(prompt), "int8") for prompt in prompts])
    return logits.argmax(-1), logits


def assert_same_or_near(found: Tensor, plain: Tensor, logits: Tensor) -> None:
    """Equal up to the first token where the two candidates are as near as the step between two codes can move them.

    A number that falls on the border between two codes goes either way with the last bit of the arithmetic.
    """
    for b, row in enumerate(found):
        differences = (row != plain[b]).nonzero()
        if len(differences):
            at = int(differences[0])
            step = logits[b, at]
            assert step[plain[b, at]] - step[row[at]] < 1e-3 * (step.max() - step.min()), (b, at)


def drafted(name: str, prompts: Sequence[Sequence[int]], settings: dict[str, int], **kwargs: Any) -> None:
    """Drafts that are right for a while leave the text as it is token by token."""
    plain, logits = plain_text(name, prompts)
    inputs = left_padded(prompts)
    length = inputs["input_ids"].shape[1]
    truth = torch.cat((inputs["input_ids"], plain), 1)
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    with configured(drafter_of(name), cache_type="int8", **settings) as eagle, oracle_drafts(truth, length):
        out = target_of(name).generate(**inputs, assistant_model=eagle, **how)
        assert (eagle.stats.loop, eagle.stats.cache_type) == ("own", "int8")
        assert eagle.stats.accepted > 0
    assert_same_or_near(out[:, length:], plain, logits)


CELLS = [*itertools.product(WHOLE, SHAPES, (1, 3)), *pairwise(("mistral", "gpt_neox", "mixtral"), [*SHAPES], (1, 3))]


@pytest.mark.parametrize(("name", "shape", "batch_size"), CELLS)
@pytest.mark.thorough(every=2)
def test_drafting_does_not_change_the_text(name: str, shape: str, batch_size: int) -> None:
    drafted(name, prompts_for(name, batch_size, seed=batch_size), SHAPES[shape], prefill_chunk_size=5)


@pytest.mark.parametrize("name", ["llama", "shared keys"])
def test_a_cache_of_few_bits_is_really_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of rounded keys and values: near the full ones, and not equal to them. Layers may attend to
    what an earlier one has unpacked."""
    fields = GEMMA_4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    monkeypatch.setitem(CONFIGS, "shared keys", lambda: Gemma4TextConfig(**fields))
    prompt = tuple(prompts_for(name, 1)[0])
    full, packed = (token_by_token(name, prompt, kind, new_tokens=1)[0] for kind in ("full", "int8"))
    difference = (full - packed).abs().max() / (full.max() - full.min())
    assert 1e-4 < difference < 0.2
    drafted(name, [prompt], SHAPES["tree"])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_conversation_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    """The carried cache is a stock one in full precision; rounding it again must change nothing."""
    target, carried = target_of(name), {"past_key_values": DynamicCache(config=target_of(name).config)}
    with configured(drafter_of(name), cache_type="int8") as eagle:
        how = {"max_new_tokens": 10, "assistant_model": eagle}
        first = write(target, left_padded(prompts_for(name, 1, seed=5)), **how, **carried)
        longer = torch.cat((first, torch.tensor([[5, 6, 7]])), 1)
        again, went_on = (write(target, longer, **how, **past) for past in ({}, carried))
    assert torch.equal(went_on, again)
