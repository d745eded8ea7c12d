"""Masks and positions against the formula, cell by cell."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror import layer_kinds

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafting.draft_tree import ancestors_from_parents


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
