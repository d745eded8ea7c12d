"""Drafters that see a window of the text only: what they draft, what they hold, and the text, which stays the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter import session as drafter_session
from eagle31_hf.drafter.session import WINDOWED_READ, DraftSession
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.loop.pair_caches import PairCaches
from eagle31_hf.targets.devices import warn_once
from helpers import (
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    prompts_for,
    random_drafter,
    switching_policies,
    target_of,
    use_fixed_shapes_only,
)

WINDOW = 6
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 12}}


def texts_of(eagle: Eagle31Drafter, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and hidden states of a text, any do."""
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, eagle.config.vocab_size, (1, length), generator=dice)
    width = eagle.config.num_aux_hidden_states * eagle.config.target_hidden_size
    return tokens, torch.randn(1, length, width, generator=dice)


@torch.no_grad()
def test_a_window_hides_what_lies_before_it() -> None:
    """Against one pass over the whole text under a mask written by hand."""
    eagle = drafter_of("llama")
    tokens, aux = texts_of(eagle, 24)
    places = torch.arange(24)
    back = places[:, None] - places
    hidden = (back < 0) | (back >= WINDOW)
    mask = torch.zeros(24, 24).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    out = eagle.decode(eagle.embed(tokens), eagle.fuse_aux(aux), eagle.rotary(places[None]), mask, None)
    with configured(eagle, draft_window=WINDOW):
        session = DraftSession(eagle, batch_size=1, capacity=64, block=5)
    for start, end in ((0, 11), (11, 13), (13, 24)):  # more than the block at once is read in pieces
        session.absorb(tokens[:, start:end], aux[:, start:end], [end - start])
        torch.testing.assert_close(session.root.feedback[:, 0], out.feedback[:, end - 1])
    assert session.cache.layers[0].keys.shape[2] == WINDOW - 1 + 5


@torch.no_grad()
def test_rows_of_unlike_length_are_read_in_pieces() -> None:
    eagle = drafter_of("llama")
    tokens, aux = (part.expand(2, *part.shape[1:]) for part in texts_of(eagle, 23))
    counts = [23, 9]
    with configured(eagle, draft_window=WINDOW):
        together = DraftSession(eagle, batch_size=2, capacity=64, block=5)
        together.absorb(tokens, aux, counts)
        for row, count in enumerate(counts):
            alone = DraftSession(eagle, batch_size=1, capacity=64, block=64)
            alone.absorb(tokens[:1, :count], aux[:1, :count], [count])
            torch.testing.assert_close(together.root.feedback[row], alone.root.feedback[0])
    assert together.cache.lengths == counts


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_the_targets(shape: str, rows: int) -> None:
    inputs = left_padded(prompts_for("llama", rows, seed=5))
    settings = SHAPES[shape] | {"num_assistant_tokens": 4, "draft_window": WINDOW}
    kwargs = {"settings": settings, "oracle": 0, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert_same_text(target_of("llama"), drafter_of("llama"), inputs, **kwargs)
    with switching_policies():
        assert_same_text(target_of("llama"), drafter_of("llama"), inputs, **kwargs)


@pytest.mark.parametrize("fields", [{"acceleration": "compile"}, {"acceleration": "eager", "prefill_chunk_size": 3}])
def test_every_loop_keeps_to_the_window(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
    inputs = left_padded(prompts_for("llama", 1, seed=5))
    with configured(drafter_of("llama"), draft_window=WINDOW, **fields) as eagle:
        assert_same_text(target_of("llama"), eagle, inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert len(eagle.stats.fallbacks) == (fields["acceleration"] == "compile")
    assert all("window" in fallback for fallback in eagle.stats.fallbacks)


def test_a_turn_goes_on_though_the_window_has_slid() -> None:
    target, eagle = target_of("llama"), drafter_of("llama")
    inputs = left_padded(prompts_for("llama", 1, seed=5))
    kwargs = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with configured(eagle, draft_window=WINDOW):
        first = target.generate(**inputs, **kwargs, assistant_model=eagle)
        ids = torch.cat((first.sequences, torch.tensor([[5, 6, 7]])), 1)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        second = target.generate(**again, **kwargs, past_key_values=first.past_key_values, assistant_model=eagle)
    plain = target.generate(**again, **kwargs)
    assert torch.equal(second.sequences, plain.sequences)
    assert eagle.stats.prefilled_tokens < ids.shape[1]


def drafter_bytes(eagle: Eagle31Drafter, length: int, window: int | None) -> int:
    """Of all that the drafter's cache owns after reading so many tokens of a prompt at once."""
    with configured(eagle, draft_window=window):
        caches = PairCaches.make(eagle, DraftShape(depth=6), batch_size=1, length=length + 64, chunk=length)
        assert caches.drafter is not None
        tokens, aux = texts_of(eagle, length)
        caches.drafter.absorb(tokens, aux, [length])
    cache = caches.drafter.cache
    assert cache.num_bytes >= sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return cache.num_bytes


@torch.no_grad()
def test_a_window_bounds_the_bytes_from_2k_to_32k_tokens() -> None:
    eagle = drafter_of("llama")
    assert WINDOWED_READ <= 1024
    assert drafter_bytes(eagle, 2048, 1024) == drafter_bytes(eagle, 32768, 1024)
    assert drafter_bytes(eagle, 4096, None) > 1.9 * drafter_bytes(eagle, 2048, None)


def test_nobody_is_warned_before_the_trained_length_is_passed_and_once_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    inputs = left_padded(prompts_for("llama", 1, seed=5))
    eagle, kwargs = drafter_of("llama"), {"do_sample": False, "pad_token_id": 0}
    monkeypatch.setattr(eagle.config, "max_position_embeddings", inputs["input_ids"].shape[1] + 20)
    for new_tokens, warned in ((16, 0), (40, 1), (40, 1)):
        with caplog.at_level(logging.WARNING):
            out = target_of("llama").generate(**inputs, **kwargs, max_new_tokens=new_tokens, assistant_model=eagle)
        assert sum("made for" in message for message in caplog.messages) == warned
    assert "draft_window" in caplog.text
    assert torch.equal(out, target_of("llama").generate(**inputs, **kwargs, max_new_tokens=40))


@pytest.mark.parametrize("name", ["plain", "speculators"])
def test_a_drafters_own_window_is_kept_and_the_smaller_one_counts(name: str, tmp_path) -> None:
    random_drafter(target_of("llama"), aux_layers=[1, 2, 4], sliding_window=128).save_pretrained(tmp_path, format=name)
    eagle = Eagle31Drafter.from_pretrained(tmp_path)
    assert drafter_session.attention_window(eagle) == 128
    with configured(eagle, draft_window=64):
        assert drafter_session.attention_window(eagle) == 64
