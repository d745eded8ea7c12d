"""Keys and values in 8 bits: against a list of rounded vectors, bit for bit through every rollback, within the plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from mirror import DTYPES, Mirror
from transformers import DynamicCache, LlamaConfig

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.memory.activation_bytes import packed_cache_bytes, unpacked_layer_bytes
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.target_facts import decoder_shape
from helpers import CONFIGS, first_row

WINDOW = 6


# --- rollback ---------------------------------------------------------------------------------------------------------


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


def assert_same_storage(one: Mirror, other: Mirror) -> None:
    for found, wanted in zip(one.stored(), other.stored(), strict=True):
        assert torch.equal(found, wanted)


EDGES = [7, 8, 9, 15, 16, 17]  # around chunks of 8 and slabs of 16
LAYOUTS = {"full": [None, None], "window": [None, WINDOW, WINDOW]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.thorough(every=3)
def test_rejected_tokens_leave_no_trace(layout: str, batch_size: int, length: int) -> None:
    """A block of 8 of which any number is kept, at every offset around a block's edge."""
    lengths = [length + 3 * b for b in range(batch_size)]
    for kept in range(9):
        one, never = (grown(Mirror(LAYOUTS[layout], batch_size, slab=16), lengths) for _ in range(2))
        drafts = torch.arange(8).expand(batch_size, -1) + 5000
        one.write(8, tokens=drafts)
        one.commit(drafts, [kept] * batch_size)
        if kept:
            never.write(kept, tokens=drafts[:, :kept])
            never.cache.commit(kept)
        never.rows = one.rows
        assert_same_storage(one, never)
        one.check()
        # The next round reads the same, too.
        for mirror in (one, never):
            mirror.write(2, tokens=torch.full((batch_size, 2), 9000))
        if batch_size == 1:  # in a batch, what lies behind a shorter row is hidden by its mask
            for a, b in zip(one.cache.layers, never.cache.layers, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a.read(), b.read(), strict=True))


@pytest.mark.parametrize("windows", LAYOUTS.values(), ids=list(LAYOUTS))
def test_accepted_paths_of_trees_are_moved_bit_for_bit(windows: list[int | None]) -> None:
    rng = random.Random(0)
    one, never = (grown(Mirror(windows, 3, slab=16), [6, 15, 9]) for _ in range(2))
    for round_number in range(5):
        nodes = torch.arange(7).expand(3, -1) + 100 * round_number + torch.tensor([[10_000], [20_000], [30_000]])
        paths = [[0, *sorted(rng.sample(range(1, 7), count))] for count in rng.sample(range(5), 3)]
        one.write(7, tokens=nodes)
        one.keep(nodes, paths)
        accepted = torch.nn.utils.rnn.pad_sequence([nodes[b, path] for b, path in enumerate(paths)], batch_first=True)
        never.write(accepted.shape[1], tokens=accepted)
        never.commit(accepted, [len(path) for path in paths])
        assert_same_storage(one, never)
        one.check()


def test_a_copy_is_independent() -> None:
    one = grown(Mirror([None, WINDOW]), [11])
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
    shape = decoder_shape(config, SCHEMES["bf16"])
    block = sizes["block"]
    for _ in range(sizes["capacity"] // block):
        cache.place(block)
        for layer in range(shape.num_layers):
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
    shape = decoder_shape(config, SCHEMES["bf16"])
    cache = filled(config, batch_size=3, capacity=64, block=8, slab=slab)
    planned = packed_cache_bytes(shape, 64, 8) + unpacked_layer_bytes(shape, 64, 8)
    assert cache.num_bytes == 3 * planned
    assert cache._workspace.num_bytes == 3 * unpacked_layer_bytes(shape, 64, 8)


def test_the_workspace_is_made_once_and_shared() -> None:
    mirror = Mirror([None, WINDOW, None], 2)
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
