"""What a configuration says of windows, and what a cache refuses before anything is written."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import StaticCache

from eagle31_hf.cache.spans import LayerKind, LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.errors import IncompatibleTargetError, UnsupportedGenerationError
from families import TEXT_FAMILIES
from helpers import GROUPED, WINDOW, random_drafter, random_target, target_of


def kinds_of(kind: str, capacity: int = 64, masks_by_type: bool | None = None, **fields):
    config = TEXT_FAMILIES[kind]() if kind in TEXT_FAMILIES else AutoConfig.for_model(kind, **{**GROUPED, **fields})
    cache = SpeculativeCache.from_config(config, batch_size=1, capacity=capacity, block=8, masks_by_type=masks_by_type)
    return cache.kinds


def cache_of(model):
    return SpeculativeCache.from_config(model.config, batch_size=1, capacity=128, block=16)


def test_windows_come_from_the_config():
    full, sliding = LayerKind(), LayerKind(WINDOW)
    assert kinds_of("llama").by_mask == {"full_attention": full}
    assert kinds_of("mistral", sliding_window=WINDOW).layers == (sliding,) * 4
    assert kinds_of("mistral", sliding_window=None).layers == (full,) * 4
    assert kinds_of("phi3", sliding_window=WINDOW).types is None
    assert kinds_of("qwen3").types == ("full_attention",) * 4
    mixed = kinds_of("gemma3_text", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
    assert mixed.by_mask == {"sliding_attention": sliding, "full_attention": full}
    chunked = kinds_of("llama4_text")
    assert chunked.by_mask["chunked_attention"] == LayerKind(WINDOW, chunked=True)
    stray = kinds_of("mistral", masks_by_type=False, sliding_window=WINDOW, layer_types=["full_attention"] * 4)
    assert stray.types is None
    assert stray.layers == (sliding,) * 4


def test_a_window_that_no_row_outgrows_is_full_attention():
    assert kinds_of("mistral", capacity=WINDOW, sliding_window=WINDOW).rings == set()
    assert kinds_of("mistral", capacity=WINDOW + 1, sliding_window=WINDOW).rings == {WINDOW - 1}


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
        kinds_of("llama4_text", capacity=8192)


def test_forwards_that_were_not_placed_are_refused():
    cache = SpeculativeCache(LayerKinds((LayerKind(),)), batch_size=1, capacity=16, block=4)
    states = torch.zeros(1, 1, 3, 2)
    with pytest.raises(UnsupportedGenerationError, match="place"):
        cache.update(states, states, 0)
    cache.place(2)
    with pytest.raises(UnsupportedGenerationError, match="1 rows of 3 tokens"):
        cache.update(states, states, 0)
    model = target_of("llama")
    with pytest.raises(UnsupportedGenerationError, match="had been placed"):
        model.generate(torch.tensor([[3, 4, 5]]), past_key_values=cache_of(model), max_new_tokens=2)


def test_foreign_caches_are_refused():
    model = target_of("llama")
    ours = cache_of(model)
    static = StaticCache(config=model.config, max_cache_len=16)
    model(torch.tensor([[3, 4, 5]]), past_key_values=static)
    with pytest.raises(UnsupportedGenerationError, match="StaticLayer"):
        ours.load_dynamic(static)
    two_rows = DynamicCache(config=model.config)
    model(torch.tensor([[3, 4, 5]] * 2), past_key_values=two_rows)
    with pytest.raises(UnsupportedGenerationError, match="of 2 rows"):
        ours.load_dynamic(two_rows)
    assert ours.lengths == [0]


def test_a_window_is_not_carried_in_a_stock_layer_that_keeps_all() -> None:
    """Of layer types that the model never reads transformers' cache believes that they see everything."""
    fields = {**GROUPED, "sliding_window": WINDOW, "layer_types": ["full_attention"] * 4}
    target = random_target(AutoConfig.for_model("mistral", **fields))
    carried, drafter = DynamicCache(config=target.config), random_drafter(target)
    how = {"inputs": torch.arange(5, 25)[None], "max_new_tokens": 8, "do_sample": False}
    text = target.generate(**how, assistant_model=drafter, **{CACHE_ARGUMENT: carried})
    assert (drafter.stats.loop, carried.get_seq_length()) == ("own", 0)
    assert torch.equal(text, target.generate(**how))
