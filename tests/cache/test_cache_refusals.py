"""What a configuration says of windows, and what a cache refuses before anything is written."""

from __future__ import annotations

import random

import pytest
import torch
from stock_models import COMMON, MIXED, MODELS, WINDOW, make_cache, prefill, random_rows, tiny_model
from transformers import AutoConfig, DynamicCache, Gemma3nTextConfig
from transformers.cache_utils import StaticCache

from eagle31_hf.cache.spans import AttentionSpan, LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError, MemoryPlanError, UnsupportedGenerationError
from helpers import first_row


def spans_of(kind: str, capacity: int = 64, masks_by_type: bool | None = None, **fields):
    config = AutoConfig.for_model(kind, **{**COMMON, **fields})
    cache = SpeculativeCache.from_config(config, batch_size=1, capacity=capacity, block=8, masks_by_type=masks_by_type)
    return cache._spans


def test_windows_come_from_the_config():
    full, sliding = AttentionSpan(), AttentionSpan(WINDOW)
    assert spans_of("llama").by_mask == {"full_attention": full}
    assert spans_of("mistral", sliding_window=WINDOW).spans == (sliding,) * 3
    assert spans_of("mistral", sliding_window=None).spans == (full,) * 3
    assert spans_of("phi3", sliding_window=WINDOW).types is None
    assert spans_of("qwen3").types == ("full_attention",) * 3
    mixed = spans_of("gemma3_text", sliding_window=WINDOW, layer_types=MIXED)
    assert mixed.by_mask == {"sliding_attention": sliding, "full_attention": full}
    chunked = spans_of("llama4_text", **MODELS["llama4-chunked"][1])
    assert chunked.by_mask["chunked_attention"] == AttentionSpan(WINDOW, chunked=True)
    stray = spans_of("mistral", masks_by_type=False, sliding_window=WINDOW, layer_types=["full_attention"] * 3)
    assert stray.types is None
    assert stray.spans == (sliding,) * 3


def test_a_window_that_no_row_outgrows_is_full_attention():
    assert spans_of("mistral", capacity=WINDOW, sliding_window=WINDOW).rings == set()
    assert spans_of("mistral", capacity=WINDOW + 1, sliding_window=WINDOW).rings == {WINDOW - 1}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3_moe", dict(layer_types=["deepseek_sparse_attention"] * 2, num_hidden_layers=2)),
        ("minimax", dict(layer_types=["linear_attention", "deepseek_sparse_attention"], num_hidden_layers=2)),
    ],
)
def test_layers_that_keep_something_else_are_refused(kind, fields):
    config = AutoConfig.for_model(kind, **fields)
    with pytest.raises(IncompatibleTargetError, match=kind):
        SpeculativeCache.from_config(config, batch_size=1, capacity=8, block=8)


def test_llama4_is_refused_where_its_query_scale_would_follow_slots():
    with pytest.raises(IncompatibleTargetError, match="8192"):
        spans_of("llama4_text", capacity=8192, **MODELS["llama4-chunked"][1])


@pytest.mark.parametrize(
    ("kinds", "fields", "message"),
    [
        (LayerKinds([None]), {"capacity": 0}, "capacity"),
        (LayerKinds([None, 4]), {}, "one window per mask"),
        (LayerKinds([None, 4], ["full_attention"]), {}, "layer types"),
        (LayerKinds([None]), {"cache_type": "int4"}, r"int4.*full, int8"),
    ],
)
def test_sizes_windows_and_types_are_checked(kinds, fields, message):
    with pytest.raises(ConfigurationError, match=message):
        SpeculativeCache(kinds, **{"batch_size": 1, "capacity": 32, "block": 4, **fields})


def test_layers_that_share_keys_are_not_stored_in_8_bits():
    config = Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["full_attention"] * 4)
    with pytest.raises(IncompatibleTargetError, match="another layer's keys and values"):
        SpeculativeCache.from_config(config, batch_size=1, capacity=8, block=4, cache_type="int8")


def test_what_does_not_fit_is_refused_before_anything_is_written():
    cache = SpeculativeCache(LayerKinds([None]), batch_size=2, capacity=10, block=6)
    with pytest.raises(MemoryPlanError, match="block=6"):
        cache.place(7)
    with pytest.raises(MemoryPlanError, match="block=6"):
        cache.place(3, after=4)
    cache.place(6)
    cache.commit([6, 2])
    with pytest.raises(MemoryPlanError, match="capacity=10"):
        cache.place(5)
    assert cache.lengths == [6, 2]
    cache.place(4)
    with pytest.raises(UnsupportedGenerationError, match=r"\[7, 2\]"):
        cache.rollback([7, 2])


def test_forwards_that_were_not_placed_are_refused():
    cache = SpeculativeCache(LayerKinds([None]), batch_size=1, capacity=16, block=4)
    states = torch.zeros(1, 1, 3, 2)
    with pytest.raises(UnsupportedGenerationError, match="place"):
        cache.update(states, states, 0)
    cache.place(2)
    with pytest.raises(UnsupportedGenerationError, match="1 rows of 3 tokens"):
        cache.update(states, states, 0)
    model = tiny_model("llama")
    with pytest.raises(UnsupportedGenerationError, match="had been placed"):
        model.generate(torch.tensor([[3, 4, 5]]), past_key_values=make_cache(model, 1), max_new_tokens=2)


@pytest.mark.parametrize(
    ("path", "counts"),
    [(None, [4, 1]), (None, [1]), (None, [-1, 1]), ([[0, 3], [0, 1]], [2, 2]), ([[0], [-1]], [1, 1])],
)
def test_nodes_outside_the_block_are_not_kept(path, counts):
    cache = SpeculativeCache(LayerKinds([None]), batch_size=2, capacity=16, block=4)
    cache.place(3)
    with pytest.raises(UnsupportedGenerationError, match="below 3"):
        cache.keep(path, counts)
    assert cache.lengths == [0, 0]


def test_foreign_caches_are_refused():
    model = tiny_model("llama")
    ours = make_cache(model, 1)
    static = StaticCache(config=model.config, max_cache_len=16)
    model(torch.tensor([[3, 4, 5]]), past_key_values=static)
    with pytest.raises(UnsupportedGenerationError, match="StaticLayer"):
        ours.load_dynamic(static)
    two_rows = DynamicCache(config=model.config)
    model(torch.tensor([[3, 4, 5]] * 2), past_key_values=two_rows)
    with pytest.raises(UnsupportedGenerationError, match="of 2 rows"):
        ours.load_dynamic(two_rows)
    long = DynamicCache(config=model.config)
    model(torch.tensor([[3] * 129]), past_key_values=long)
    with pytest.raises(MemoryPlanError, match="129"):
        ours.load_dynamic(long)
    assert ours.lengths == [0]


def test_a_window_is_not_exported_into_a_stock_layer_that_keeps_all():
    model, rng = tiny_model("mistral-windowed"), random.Random(0)
    cache = make_cache(model, 1)
    prefill(model, cache, random_rows(rng, (12,)))
    theirs = DynamicCache()
    theirs.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    with pytest.raises(UnsupportedGenerationError, match=r"config=model\.config"):
        first_row(cache, theirs)
    assert theirs.get_seq_length() == 3
