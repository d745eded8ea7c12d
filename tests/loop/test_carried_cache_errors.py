"""Carried caches that cannot be, and turns that break off: what is refused, and what is left afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from carried_turns import (
    FULL,
    SLIDING,
    after_one_turn,
    assert_same_contents,
    equal_rows,
    new_cache,
    ours,
    plain,
    target_positions,
    users_turn,
)
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.errors import UnsupportedGenerationError

pytestmark = pytest.mark.contract


def test_a_cache_of_other_rows_is_refused():
    cache = new_cache("llama")
    text = users_turn(plain("llama", equal_rows("llama"), past_key_values=cache))
    with pytest.raises(UnsupportedGenerationError, match="1 rows"):
        ours("llama", text[:1], cache)


def test_a_mask_that_fits_neither_form_is_refused():
    text, cache = after_one_turn("llama")
    text = users_turn(text)
    with pytest.raises(UnsupportedGenerationError, match="or only the tokens after"):
        ours("llama", text[:, -3:], cache, attention_mask=torch.ones_like(text)[:, 1:])


class Broken(Exception):
    pass


class BreakingStreamer:
    def __init__(self, after: int):
        self.left = after

    def put(self, _tokens: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Broken

    def end(self) -> None: ...


@pytest.mark.parametrize("puts", [1, 3])  # in the prefill, in a later round
@pytest.mark.parametrize("name", [*FULL, *SLIDING])
def test_an_interrupted_turn_leaves_the_cache_usable(name, puts):
    text, cache = after_one_turn(name)
    text, before = users_turn(text), copy.deepcopy(cache)
    with pytest.raises(Broken):
        ours(name, text, cache, streamer=BreakingStreamer(puts))
    assert_same_contents(cache, before)
    with target_positions(name) as counts:
        assert torch.equal(ours(name, text, cache), plain(name, text))
    assert counts[0] == 6


def test_a_failure_while_refilling_empties_the_cache(monkeypatch):
    text, cache = after_one_turn("llama")
    text = users_turn(text)
    update = DynamicCache.update

    def failing(self: DynamicCache, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self is cache and layer_idx == 2:
            raise Broken
        return update(self, keys, values, layer_idx, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "update", failing)
        with pytest.raises(Broken):
            ours("llama", text, cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(ours("llama", text, cache), plain("llama", text))
