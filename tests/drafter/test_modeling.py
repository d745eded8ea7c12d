"""The drafter network and its session at work, with a window of the text, too, which leaves the text the same.

Formulas are tried in tests/checkpoints/test_published_drafts.py.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Config, Eagle31Drafter
from eagle31_hf.drafter import session as drafter_session
from eagle31_hf.drafter.session import MOST_UNREAD, MOST_UNREAD_OF_SEVERAL, WINDOWED_READ, DraftSession
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.errors import CheckpointFormatError
from eagle31_hf.loop.pair_caches import PairCaches
from eagle31_hf.targets.devices import warn_once
from helpers import (
    assert_same_text,
    assert_same_turns,
    configured,
    drafter_of,
    left_padded,
    one,
    prompts_for,
    random_drafter,
    seeded,
    switching_policies,
    target_of,
    use_fixed_shapes_only,
)


def texts_of(drafter: Eagle31Drafter, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens `(rows, length)` and hidden states `(rows, length, A*Ht)` of texts, any do."""
    width = drafter.config.num_aux_hidden_states * drafter.config.target_hidden_size
    with seeded(9):
        return torch.randint(3, drafter.config.vocab_size, (rows, length)), torch.randn(rows, length, width)


@torch.no_grad()
def test_drafts_leave_no_trace_in_the_cache() -> None:
    """After a round the drafter reads the true hidden states as if it had never drafted."""
    drafter = drafter_of("llama")
    ids, aux = texts_of(drafter, 1, 8)
    with_drafts = DraftSession(drafter, batch_size=1, capacity=32, block=8)
    without = DraftSession(drafter, batch_size=1, capacity=32, block=8)
    for session in (with_drafts, without):
        session.absorb(ids[:, :5], aux[:, :5], [5])
    state = with_drafts.root
    for step in range(4):
        state = with_drafts.step(torch.full((1, 1), step), state.feedback, after=step, depth=step)
    for session in (with_drafts, without):
        session.absorb(ids[:, 5:], aux[:, 5:], [3])
    torch.testing.assert_close(with_drafts.root.logits, without.root.logits, atol=1e-6, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("counts", "widths"), [([3], []), ([20], []), ([3, 3], [16]), ([5, 0, 2], [16]), ([20, 1, 7], [20, 16])], ids=str
)
def test_a_rounds_rotary_tables_are_made_once(
    counts: list[int], widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What turned a draft turns the positions absorbed next, and a single row goes on with what is left of its table.
    Several rows that read more than a draft has need one for that, too."""
    drafter = drafter_of("llama")
    rows = len(counts)
    session = DraftSession(drafter, batch_size=rows, capacity=64, block=32)
    rotary, tables = drafter.rotary, []
    monkeypatch.setattr(drafter, "rotary", lambda positions: tables.append(positions) or rotary(positions))
    for before in (range(1, rows + 1), counts):  # rows start the round that is looked at with unlike lengths
        tables.clear()
        session.absorb(*texts_of(drafter, rows, max(before)), list(before))
        for depth in range(5):
            session.step(torch.zeros(rows, 1, dtype=torch.long), session.root.feedback, after=depth, depth=depth)
            wanted = rotary(session.cache.placement.lengths_tensor[:, None] + depth)
            assert all(map(torch.equal, session.rotary_at(depth), wanted))
    assert [tuple(positions.shape) for positions in tables] == [(rows, width) for width in widths]


def test_canonical_tensors_are_views() -> None:
    """Splitting the fused matrices copies nothing."""
    drafter = drafter_of("llama")
    own = {tensor.untyped_storage().data_ptr() for tensor in drafter.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in drafter.canonical_tensors().values()} <= own


def test_load_canonical_is_all_or_nothing() -> None:
    drafter = drafter_of("llama")
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    tensors = dict(drafter.canonical_tensors())
    removed = tensors.pop("fc.weight")
    tensors["layers.0.mlp.extra"] = removed
    tensors["norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointFormatError, match=r"missing: fc.weight; spare: .*extra; norm.weight is \[3\]"):
        drafter.load_canonical(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_rotary_tables_stay_fp32_when_the_dtype_changes() -> None:
    drafter = Eagle31Drafter(Eagle31Config(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=96))
    positions = torch.tensor([[5, 4000]])
    wanted = drafter.rotary(positions)
    drafter.to(torch.bfloat16)
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    for got, exact in zip(drafter.rotary(positions), wanted, strict=True):
        assert torch.equal(got, exact.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [16, 200])
@torch.no_grad()
def test_parts_that_were_put_off_are_read_in_order(rows: int, block: int) -> None:
    """Single tokens, a part that is wider than there is room for, and more of them than may wait."""
    most = MOST_UNREAD if rows == 1 else MOST_UNREAD_OF_SEVERAL
    parts = [1, 1, 5, most + 3, 1, 2, *[1] * most, 1]
    tokens, aux = texts_of(drafter_of("llama"), rows, sum(parts))
    settings = {"batch_size": rows, "capacity": sum(parts) + block, "block": block}
    at_once, later = (DraftSession(drafter_of("llama"), **settings) for _ in range(2))
    at_once.absorb(tokens, aux, [sum(parts)] * rows)
    start = 0
    for width in parts:
        later.put_off(tokens[:, start : start + width].tolist(), aux[:, start : start + width])
        start += width
    later.catch_up()
    assert later.cache.lengths == at_once.cache.lengths
    torch.testing.assert_close(later.root.logits, at_once.root.logits)
    torch.testing.assert_close(later.root.feedback, at_once.root.feedback)


WINDOW = 6
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 12}}


@torch.no_grad()
def test_a_window_hides_what_lies_before_it() -> None:
    """Against one pass over the whole text under a mask written by hand."""
    eagle = drafter_of("llama")
    tokens, aux = texts_of(eagle, 1, 24)
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
    tokens, aux = texts_of(eagle, 2, 23)
    counts = [23, 9]
    with configured(eagle, draft_window=WINDOW):
        together = DraftSession(eagle, batch_size=2, capacity=64, block=5)
        together.absorb(tokens, aux, counts)
        for row, count in enumerate(counts):
            alone = DraftSession(eagle, batch_size=1, capacity=64, block=64)
            alone.absorb(tokens[row, None, :count], aux[row, None, :count], [count])
            torch.testing.assert_close(together.root.feedback[row], alone.root.feedback[0])
    assert together.cache.lengths == counts


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_the_targets(shape: str, rows: int) -> None:
    inputs = left_padded(prompts_for("llama", rows, seed=5))
    settings = SHAPES[shape] | {"num_assistant_tokens": 4, "draft_window": WINDOW}
    kwargs = {"settings": settings, "oracle": 0, "max_new_tokens": 40}
    assert_same_text(target_of("llama"), drafter_of("llama"), inputs, **kwargs)
    with switching_policies():
        assert_same_text(target_of("llama"), drafter_of("llama"), inputs, **kwargs)


@pytest.mark.parametrize("fields", [{"acceleration": "compile"}, {"acceleration": "eager", "prefill_chunk_size": 3}])
def test_every_loop_keeps_to_the_window(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
    eagle, settings = drafter_of("llama"), {"draft_window": WINDOW, **fields}
    assert_same_text(target_of("llama"), eagle, one(), settings=settings, max_new_tokens=40)
    assert len(eagle.stats.fallbacks) == (fields["acceleration"] == "compile")
    assert all("window" in fallback for fallback in eagle.stats.fallbacks)


def test_a_turn_goes_on_though_the_window_has_slid() -> None:
    with configured(drafter_of("llama"), draft_window=WINDOW) as eagle:
        first, second = assert_same_turns(target_of("llama"), eagle, one(), max_new_tokens=20)
    assert second < first + 20


def drafter_bytes(eagle: Eagle31Drafter, length: int, window: int | None) -> int:
    """Of all that the drafter's cache owns after reading so many tokens of a prompt at once."""
    with configured(eagle, draft_window=window):
        caches = PairCaches.make(eagle, DraftShape(depth=6), batch_size=1, length=length + 64, chunk=length)
        assert caches.drafter is not None
        caches.drafter.absorb(*texts_of(eagle, 1, length), [length])
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
    eagle, inputs = drafter_of("llama"), one()
    monkeypatch.setattr(eagle.config, "max_position_embeddings", inputs["input_ids"].shape[1] + 20)
    for new_tokens, warned in ((16, 0), (40, 1), (40, 1)):
        with caplog.at_level(logging.WARNING):
            assert_same_text(target_of("llama"), eagle, inputs, max_new_tokens=new_tokens)
        assert sum("made for" in message for message in caplog.messages) == warned
    assert "draft_window" in caplog.text


@pytest.mark.parametrize("name", ["plain", "speculators"])
def test_a_drafters_own_window_is_kept_and_the_smaller_one_counts(name: str, tmp_path) -> None:
    random_drafter(target_of("llama"), aux_layers=[1, 2, 4], sliding_window=128).save_pretrained(tmp_path, format=name)
    eagle = Eagle31Drafter.from_pretrained(tmp_path)
    assert drafter_session.attention_window(eagle) == 128
    with configured(eagle, draft_window=64):
        assert drafter_session.attention_window(eagle) == 64
