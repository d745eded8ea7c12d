"""Whatever was written, kept, dropped and picked: the cache holds what plain lists hold, rounded in 8 bits.

Masks and positions are compared with their formula, cell by cell.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.cache.kept_buffers import KeptBuffers
from eagle31_hf.cache.quantized import LARGEST_CODE, decode, encode
from eagle31_hf.cache.spans import LayerKind, LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafting.draft_tree import ancestors_from_parents

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 5


def rounded(states: Tensor) -> Tensor:
    return decode(*encode(states))


@cache
def vectors_of_token(seed: int, width: int) -> Tensor:
    """`(heads, width)`, large ones and small ones."""
    dice = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-3, 3, (HEADS, 1), generator=dice)
    return torch.randn(HEADS, width, generator=dice) * size


def layer_kinds(windows: Sequence[int | None], types: Sequence[str] | None = None) -> LayerKinds:
    """Of layers that see so far back, by the masks of `types`; default: one for windows, one for none."""
    named = types or ["sliding_attention" if window else "full_attention" for window in windows]
    kinds = [LayerKind(window, kind == "chunked_attention") for window, kind in zip(windows, named, strict=True)]
    return LayerKinds(tuple(kinds), tuple(named))


@dataclass
class Mirror:
    """The cache beside plain lists: per row the tokens it holds, per token the vectors a reader must get."""

    windows: list[int | None]
    batch_size: int = 1
    cache_type: str = "int8"
    slab: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    cache: SpeculativeCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = SpeculativeCache(
            layer_kinds(self.windows),
            batch_size=self.batch_size,
            capacity=96,
            block=8,
            slab=self.slab,
            cache_type=self.cache_type,
        )
        self.rows: list[list[int]] = [[] for _ in range(self.batch_size)]  # tokens, by number
        self.next_token = 1

    def states(self, tokens: Tensor, layer: int, width: int) -> Tensor:
        """Random vectors `(B, heads, T, width)` that follow from token and layer alone."""
        seed = self.seed * 10_000_019 + layer * 11 + width
        made = [[vectors_of_token(seed + int(token) * 101, width) for token in row] for row in tokens]
        return torch.stack([torch.stack(row, 1) for row in made]).to(self.dtype)

    def as_read(self, states: Tensor) -> Tensor:
        return states if self.cache_type == "full" else rounded(states)

    def write(self, num_tokens: int, after: int = 0, tokens: Tensor | None = None) -> Tensor:
        """Write tokens `(B, T)`, new ones unless given, through every layer; check what a reader of them gets."""
        if tokens is None:
            size = self.batch_size * num_tokens
            tokens = torch.arange(self.next_token, self.next_token + size).view(-1, num_tokens)
            self.next_token += size
        self.cache.place(tokens.shape[1], after=after)
        for layer in range(len(self.windows)):
            keys, values = self.states(tokens, layer, KEY_DIM), self.states(tokens, layer, VALUE_DIM)
            for seen, written in zip(self.cache.update(keys, values, layer), (keys, values), strict=True):
                wanted = self.as_read(written)
                for b, length in enumerate(self.cache.lengths):
                    window = self.windows[layer]
                    first = (length if window is None else window - 1) + after
                    assert torch.equal(seen[b, :, first : first + tokens.shape[1]], wanted[b])
        return tokens

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows] == self.cache.placement.lengths_tensor.tolist()
        for index, (layer, window) in enumerate(zip(self.cache.layers, self.windows, strict=True)):
            if not layer.is_initialized:
                continue
            for b, row in enumerate(self.rows):
                newest = row if window is None else row[max(0, len(row) - (window - 1)) :]
                for held, width in zip(layer.held(len(row), b), (KEY_DIM, VALUE_DIM), strict=True):
                    assert held.shape == (1, HEADS, len(newest), width)
                    if newest:
                        states = self.states(torch.tensor([newest]), index, width)
                        assert torch.equal(held, self.as_read(states))

    def select(self, picked: list[int]) -> None:
        self.cache.select_rows(picked)
        self.rows, self.batch_size = [list(self.rows[b]) for b in picked], len(picked)

    def keep(self, tokens: Tensor, paths: list[list[int]]) -> None:
        """Of the tokens `(B, T)` just written, each row's path."""
        self.cache.keep(paths)
        self.rows = [row + tokens[b, path].tolist() for b, (row, path) in enumerate(zip(self.rows, paths, strict=True))]

    def commit(self, tokens: Tensor, counts: list[int]) -> None:
        self.cache.commit(counts)
        self.rows = [row + new[:n].tolist() for row, new, n in zip(self.rows, tokens, counts, strict=True)]

    def reset(self) -> None:
        self.cache.reset()
        self.rows = [[] for _ in self.rows]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_histories_equal_a_list_of_lists(data: st.DataObject) -> None:
    draw = data.draw
    windows = draw(st.sampled_from([[None, None], [None, 4, None, 4]]))
    mirror = Mirror(
        windows,
        batch_size=draw(st.integers(1, 3)),
        cache_type=draw(st.sampled_from(["full", "int8"])),
        slab=draw(st.sampled_from([None, 5])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )
    for _ in range(draw(st.integers(1, 10))):
        if max(map(len, mirror.rows)) > 80:
            break
        after = draw(st.integers(0, 3))
        tokens = mirror.write(draw(st.integers(1, 5)))
        if after:
            tokens = torch.cat([tokens, mirror.write(after, after=tokens.shape[1])], dim=1)
        size, rows = tokens.shape[1], mirror.rows
        action = draw(st.sampled_from(["keep", "commit", "forget", "select", "reset"]))
        if action == "keep":
            paths = [sorted(draw(st.sets(st.integers(0, size - 1)))) for _ in rows]
            mirror.keep(tokens, paths)
        elif action == "commit":
            mirror.commit(tokens, [draw(st.integers(0, size)) for _ in rows])
        elif action == "forget":
            mirror.cache.release()
        elif action == "select":
            mirror.select(sorted(draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))))
        else:
            mirror.reset()
        mirror.check()


@pytest.mark.parametrize("slab", [None, 16])
def test_buffers_stay_where_they_are(slab: int | None) -> None:
    mirror = Mirror([None, 4], cache_type="full", slab=slab)
    pointers = []
    for _ in range(20):
        tokens = mirror.write(4)
        mirror.keep(tokens, [[0, 3]])
        pointers.append(tuple(t.data_ptr() for layer in mirror.cache.layers for t in (layer.keys, layer.values)))
    assert mirror.cache.lengths == [40]
    # 2 tokens a round and 4 on top: slabs of 16 are outgrown twice, full size never.
    assert len(set(pointers)) == (1 if slab is None else 3)
    assert mirror.cache.layers[0].keys.shape[2] == (96 if slab is None else 48)
    assert mirror.cache.layers[1].keys.shape[2] == 3 + 8


def test_rows_that_have_left_are_not_stored_in_larger_buffers() -> None:
    mirror, alone, later = (Mirror([None], batch_size=rows, cache_type="full", slab=16) for rows in (3, 1, 3))
    kept = KeptBuffers()
    mirror.cache.write_in(kept, "target")
    for each in (mirror, alone):
        each.commit(each.write(8), [8] * each.batch_size)
    lent = mirror.cache.layers[0].keys.data_ptr()
    mirror.select([1])
    for each in (mirror, alone):
        each.commit(each.write(8), [8])
        each.write(8)
    mirror.check()
    assert mirror.cache.num_bytes == alone.cache.num_bytes
    later.cache.write_in(kept, "target")
    later.write(8)
    assert later.cache.layers[0].keys.data_ptr() == lent, "the next text has all rows again, where graphs look for them"


def naive_rounded(vector: Sequence[float]) -> list[float]:
    """One vector, in double precision and without looking at a bit."""
    largest, scale = max(abs(x) for x in vector), 2.0**-24
    while scale * LARGEST_CODE < largest:
        scale *= 2
    return [round(x / scale) * scale for x in vector]


@st.composite
def vectors(draw: st.DrawFn) -> tuple[torch.dtype, Tensor]:
    """Vectors of very unlike size, with zeros, and some that sit on the border of two scales."""
    dtype = draw(st.sampled_from(DTYPES))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        size = 2.0 ** draw(st.integers(-30, 14))
        factors = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0, 127 / 128, 255 / 256]))
        rows.append([size * draw(factors) for _ in range(6)])
    return dtype, torch.tensor(rows, dtype=torch.float64).to(dtype)[None, :, None]  # (1, rows, 1, 6)


@given(vectors())
@settings(max_examples=150, deadline=None)
def test_rounding_is_what_the_formula_says_and_happens_once(case: tuple[torch.dtype, Tensor]) -> None:
    dtype, states = case
    codes, scales = encode(states)
    assert codes.dtype == torch.int8
    assert scales.dtype == dtype
    once = rounded(states)
    wanted = [naive_rounded(vector) for vector in states[0, :, 0].double().tolist()]
    assert torch.equal(once[0, :, 0], torch.tensor(wanted, dtype=torch.float64).to(dtype))
    assert torch.equal(rounded(once), once)
    for other in DTYPES:  # at most seven bits times a power of two: only fp16 is ever out of its range
        held = once.to(other)
        assert torch.equal(held.double(), once.double()) or other == torch.float16
        if held.isfinite().all():
            assert torch.equal(rounded(held), held)


def random_trees(rng: random.Random, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors `(rows, size, size)` and depths `(rows, size)` of trees whose parents come before their children."""
    parents = [[0] + [rng.randrange(max(0, i - 3), i) for i in range(1, size)] for _ in range(rows)]
    ancestors = ancestors_from_parents(torch.tensor(parents), size)
    return ancestors, ancestors.sum(2) - 1


def naive_mask(lengths, ancestors, depths, after, window=None, chunked=False):
    """Cell by cell: full layers by slot; windowed layers by ring slot, then block."""
    num_queries, num_nodes = ancestors.shape[1:]
    ring = None if window is None else max(window - 1, 1)
    width = (max(lengths) if ring is None else ring) + num_nodes
    mask = torch.full((len(lengths), 1, num_queries, width), torch.finfo(torch.float32).min)
    for b, length in enumerate(lengths):
        node_slot = length if ring is None else ring
        held = {p if ring is None else p % ring: p for p in range(length)}
        for query in range(num_queries):
            position = length + int(depths[b, after + query])
            candidates = list(held.items())
            candidates += [
                (node_slot + j, length + int(depths[b, j])) for j in range(num_nodes) if ancestors[b, query, j]
            ]
            for slot, key_position in candidates:
                near = window is None or (
                    position // window == key_position // window if chunked else position - key_position < window
                )
                if near:
                    mask[b, 0, query, slot] = 0
    return mask


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 3),
    shared=st.booleans(),
    slab=st.sampled_from([None, 7]),
    kind=st.sampled_from(["sliding_attention", "chunked_attention"]),
    window=st.integers(1, 6),
)
def test_masks_equal_the_formula_after_every_round(seed, batch_size, shared, slab, kind, window):
    """Rounds of random trees, of which a random path is kept."""
    rng = random.Random(seed)
    kinds = layer_kinds([None, window], ["full_attention", kind])
    cache = SpeculativeCache(kinds, batch_size=batch_size, capacity=90, block=9, slab=slab)
    for _ in range(10):
        size, after = rng.randint(1, 6), rng.randint(0, 3)
        trees = random_trees(rng, 1 if shared else batch_size, after + size)
        ancestors, depths = (each.expand(batch_size, *each.shape[1:]) for each in trees)
        if after:
            cache.place(after)
            cache.attention_mask(ancestors[:, :after, :after], depths[:, :after])
        cache.place(size, after=after)
        queries = ancestors[:, after:]
        masks = cache.attention_mask(queries[:1] if shared else queries, depths[:1] if shared else depths)
        wanted = naive_mask(cache.lengths, queries, depths, after)
        full = masks["full_attention"]
        if full is None:
            assert not wanted.any()
        else:
            assert torch.equal(full.expand_as(wanted), wanted)
        wanted = naive_mask(cache.lengths, queries, depths, after, window, kind == "chunked_attention")
        assert torch.equal(masks[kind].expand_as(wanted), wanted)
        wanted_positions = torch.tensor(cache.lengths)[:, None] + depths[:, after:]
        assert torch.equal(cache.position_ids(depths[:, after:]), wanted_positions)

        count = rng.randint(0, after + size)
        cache.commit([count if rng.random() < 0.7 else rng.randint(0, after + size) for _ in range(batch_size)])
        if rng.random() < 0.2:
            cache.reset()
        if max(cache.lengths) > 75:
            break


def test_the_first_chunk_needs_no_mask_where_none_is_causal():
    for windows, lengths, after, wants in (
        ([None], [0, 0], 0, False),
        ([None, 3], [0, 0], 0, True),  # a ring's slots are no chain
        ([None], [0, 2], 0, True),
        ([None], [0, 0], 1, True),
    ):
        cache = SpeculativeCache(layer_kinds(windows), batch_size=2, capacity=20, block=6)
        cache.place(2)
        cache.commit(lengths)
        cache.place(4, after=after)
        made = cache.attention_mask(none_is_causal=True).values()
        assert any(mask is not None for mask in made) == wants
        assert all(mask is not None for mask in cache.attention_mask().values()), "unless the model says so"
