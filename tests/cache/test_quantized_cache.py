"""Keys and values in 8 bits: against a list of rounded vectors, bit for bit through every rollback, within the plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from mirror import DTYPES, Mirror
from transformers import DynamicCache, LlamaConfig

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.target_facts import dry_run_of, sizes_by_layer
from helpers import CONFIGS, first_row


def grown(mirror: Mirror, lengths: Sequence[int]) -> Mirror:
    """Rows of these lengths, read in right-padded chunks of 8; row `b` consists of tokens `1000 b + 1, 2, ...`."""
    texts = [[1000 * b + i + 1 for i in range(length)] for b, length in enumerate(lengths)]
    for start in range(0, max(lengths), 8):
        parts = [text[start : start + 8] for text in texts]
        width = max(map(len, parts))
        mirror.write(width, tokens=torch.tensor([part + [0] * (width - len(part)) for part in parts]))
        mirror.cache.commit([len(part) for part in parts])
    mirror.rows = texts
    return mirror


def test_a_copy_is_independent() -> None:
    one = grown(Mirror([None, 6]), [11])
    twin = copy.deepcopy(one)
    one.write(4)
    one.cache.commit(4)
    twin.check()
    assert twin.cache._workspace is not one.cache._workspace


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_survives_the_way_through_a_stock_one_bit_for_bit(dtype: torch.dtype) -> None:
    one = grown(Mirror([None, None], dtype=dtype), [13])
    stock = first_row(one.cache, DynamicCache(config=LlamaConfig(num_hidden_layers=2)))
    assert stock.layers[0].keys.dtype == dtype
    back = Mirror([None, None], dtype=dtype)
    back.cache.load_dynamic(stock)
    back.rows = one.rows
    back.check()
    assert all(map(torch.equal, back.stored(), one.stored()))


# --- memory -----------------------------------------------------------------------------------------------------------


def filled(config, **sizes) -> SpeculativeCache:
    """A cache that has held a block of states as the model of `config` makes them, in bf16."""
    cache = SpeculativeCache.from_config(config, cache_type="int8", **sizes)
    shape, block = sizes_by_layer(config)[0], sizes["block"]
    for _ in range(sizes["capacity"] // block):
        cache.place(block)
        for layer in range(config.num_hidden_layers):
            size = (sizes["batch_size"], shape.kv_heads, block)
            cache.update(
                torch.ones(*size, shape.key_dim, dtype=torch.bfloat16),
                torch.ones(*size, shape.value_dim, dtype=torch.bfloat16),
                layer,
            )
        cache.commit(block)
    return cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("slab", [None, 16])
def test_bytes_are_those_of_the_plan(family: str, slab: int | None) -> None:
    config = CONFIGS[family]()
    planned = dry_run_of(config, SCHEMES["bf16"]).count(8, 64, capacity=64, block=8, batch=3, cache_type="int8")
    cache = filled(config, batch_size=3, capacity=64, block=8, slab=slab)
    assert cache.num_bytes == pytest.approx(planned.cache + planned.beside, rel=1e-3)


def test_the_workspace_is_made_once_and_shared() -> None:
    mirror = Mirror([None, 6, None], 2)
    places, sizes = set(), set()
    for _ in range(10):
        mirror.write(6)
        mirror.cache.commit([3, 2])
        for layer in mirror.cache.layers:
            keys, values = layer.read()
            places.add(keys.untyped_storage().data_ptr())
            assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        sizes.add(mirror.cache.num_bytes)
    assert len(places) == len(sizes) == 1
    mirror.cache._workspace.clear()
    assert mirror.cache.num_bytes < sizes.pop()
    mirror.write(2)  # takes it anew
