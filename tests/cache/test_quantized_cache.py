"""Keys and values in 8 bits: against a list of rounded vectors, bit for bit through every rollback, within the plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_mirror import DTYPES, PACKED, Mirror
from transformers import DynamicCache, LlamaConfig

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.memory.activation_bytes import packed_cache_bytes, unpacked_layer_bytes
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.target_facts import decoder_shape
from helpers import CONFIGS, first_row

WINDOW = 6


# --- a list of rounded vectors ----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_histories_equal_a_list_of_rounded_vectors(data: st.DataObject) -> None:
    draw = data.draw
    mirror = Mirror(
        draw(st.sampled_from(PACKED)),
        [None, 4, None],
        batch_size=draw(st.integers(1, 3)),
        slab=draw(st.sampled_from([None, 5])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )
    for _ in range(draw(st.integers(1, 8))):
        after = draw(st.integers(0, 3))
        tokens = mirror.write(draw(st.integers(1, 5)))
        if after:
            tokens = torch.cat([tokens, mirror.write(after, after=tokens.shape[1])], dim=1)
        size, rows = tokens.shape[1], mirror.rows
        action = draw(st.sampled_from(["keep", "commit", "forget", "select", "crop"]))
        if action == "keep":
            paths = [draw(st.lists(st.integers(0, size - 1), unique=True).map(sorted)) for _ in rows]
            width = max(1, *map(len, paths))
            mirror.cache.keep([path + [0] * (width - len(path)) for path in paths], [len(path) for path in paths])
            for b, path in enumerate(paths):
                rows[b] += tokens[b, path].tolist()
        elif action == "commit":
            counts = [draw(st.integers(0, size)) for _ in rows]
            mirror.cache.commit(counts)
            for b, count in enumerate(counts):
                rows[b] += tokens[b, :count].tolist()
        elif action == "select":
            picked = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            mirror.cache.select_rows(picked)
            mirror.rows, mirror.batch_size = [list(rows[b]) for b in picked], len(picked)
        else:
            shorter = action == "crop" and all(len(row) <= 3 for row in rows)  # a ring of 3 has lost nothing
            wanted = [draw(st.integers(0, len(row))) if shorter else len(row) for row in rows]
            mirror.cache.rollback(wanted)
            mirror.rows = [row[:n] for n, row in zip(wanted, rows, strict=True)]
        mirror.check()


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


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.thorough(every=3)
def test_rejected_tokens_leave_no_trace(kind: str, layout: str, batch_size: int, length: int) -> None:
    """A block of 8 of which any number is kept, at every offset around a block's edge."""
    lengths = [length + 3 * b for b in range(batch_size)]
    for kept in range(9):
        one, never = (grown(Mirror(kind, LAYOUTS[layout], batch_size, slab=16), lengths) for _ in range(2))
        drafts = torch.arange(8).expand(batch_size, -1) + 5000
        one.write(8, tokens=drafts)
        one.cache.keep(None, [kept] * batch_size)
        if kept:
            never.write(kept, tokens=drafts[:, :kept])
            never.cache.commit(kept)
        for mirror in (one, never):
            mirror.rows = [row + drafts[b, :kept].tolist() for b, row in enumerate(mirror.rows)]
        assert_same_storage(one, never)
        one.check()
        # The next round reads the same, too.
        for mirror in (one, never):
            mirror.write(2, tokens=torch.full((batch_size, 2), 9000))
        if batch_size == 1:  # in a batch, what lies behind a shorter row is hidden by its mask
            for a, b in zip(one.cache.layers, never.cache.layers, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a.read(), b.read(), strict=True))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("length", EDGES)
def test_truncated_rows_equal_rows_that_never_were_longer(kind: str, length: int) -> None:
    for shorter in range(length + 1):
        one = grown(Mirror(kind, [None, None], 2, slab=16), [length, length + 4])
        one.cache.rollback([shorter, shorter + 4])
        one.rows = [row[: shorter + 4 * b] for b, row in enumerate(one.rows)]
        never = grown(Mirror(kind, [None, None], 2, slab=16), [shorter, shorter + 4])
        assert_same_storage(one, never)
        one.check()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("windows", LAYOUTS.values(), ids=list(LAYOUTS))
def test_accepted_paths_of_trees_are_moved_bit_for_bit(kind: str, windows: list[int | None]) -> None:
    rng = random.Random(0)
    one, never = (grown(Mirror(kind, windows, 3, slab=16), [6, 15, 9]) for _ in range(2))
    for round_number in range(5):
        nodes = torch.arange(7).expand(3, -1) + 100 * round_number + torch.tensor([[10_000], [20_000], [30_000]])
        paths = [[0, *sorted(rng.sample(range(1, 7), count))] for count in rng.sample(range(5), 3)]
        width = max(map(len, paths))
        one.write(7, tokens=nodes)
        one.cache.keep([path + [0] * (width - len(path)) for path in paths], [len(path) for path in paths])
        accepted = [nodes[b, path].tolist() for b, path in enumerate(paths)]
        never.write(width, tokens=torch.tensor([row + [0] * (width - len(row)) for row in accepted]))
        never.cache.commit([len(path) for path in paths])
        for mirror in (one, never):
            mirror.rows = [row + new for row, new in zip(mirror.rows, accepted, strict=True)]
        assert_same_storage(one, never)
        one.check()


@pytest.mark.parametrize("kind", PACKED)
def test_a_copy_is_independent(kind: str) -> None:
    one = grown(Mirror(kind, [None, WINDOW]), [11])
    twin = copy.deepcopy(one)
    one.write(4)
    one.cache.commit(4)
    twin.check()
    assert twin.cache._workspace is not one.cache._workspace


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_survives_the_way_through_a_stock_one_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    one = grown(Mirror(kind, [None, None], dtype=dtype), [13])
    stock = first_row(one.cache, DynamicCache(config=LlamaConfig(num_hidden_layers=2)))
    assert stock.layers[0].keys.dtype == dtype
    back = Mirror(kind, [None, None], dtype=dtype)
    back.cache.load_dynamic(stock)
    back.rows = one.rows
    back.check()
    assert all(map(torch.equal, back.stored(), one.stored()))


# --- memory -----------------------------------------------------------------------------------------------------------


def filled(config, kind: str, **sizes) -> SpeculativeCache:
    """A cache that has held a block of states as the model of `config` makes them, in bf16."""
    cache = SpeculativeCache.from_config(config, cache_type=kind, **sizes)
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


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("slab", [None, 16])
def test_bytes_are_those_of_the_plan(kind: str, family: str, slab: int | None) -> None:
    config = CONFIGS[family]()
    shape = decoder_shape(config, SCHEMES["bf16"])
    cache = filled(config, kind, batch_size=3, capacity=64, block=8, slab=slab)
    planned = packed_cache_bytes(shape, 64, 8) + unpacked_layer_bytes(shape, 64, 8)
    assert cache.num_bytes == 3 * planned
    assert cache._workspace.num_bytes == 3 * unpacked_layer_bytes(shape, 64, 8)


@pytest.mark.parametrize("kind", PACKED)
def test_the_workspace_is_made_once_and_shared(kind: str) -> None:
    mirror = Mirror(kind, [None, WINDOW, None], 2)
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
