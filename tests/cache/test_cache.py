"""The cache under stock models: every round's logits are those of one plain forward without a cache."""

from __future__ import annotations

import random

import pytest
import torch
from stock_models import (
    CELLS,
    COMMON,
    Tree,
    assert_close,
    forward,
    make_cache,
    oracle,
    prefill,
    random_rows,
    random_tree,
    tiny_model,
    tree_forward,
)
from transformers import AutoConfig, DynamicCache

from eagle31_hf.cache.spans import LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from helpers import first_row


@pytest.mark.parametrize(("name", "attention"), CELLS)
@pytest.mark.parametrize("lengths", [(13,), (6, 6), (3, 12, 21)], ids=["one", "alike", "ragged"])
@pytest.mark.thorough(every=3)
def test_rounds_on_a_stock_model_equal_plain_forwards(name, attention, lengths):
    """Chunked prefill, then random trees and random acceptances, far past the window's wrap-around."""
    model, rng = tiny_model(name, attention), random.Random(len(lengths))
    cache = make_cache(model, len(lengths))
    rows = random_rows(rng, lengths)
    prefill(model, cache, rows)
    for _ in range(6):
        size = rng.choice([1, 4, 7])
        trees = [random_tree(rng, size) for _ in rows]
        logits = tree_forward(model, cache, trees)
        kept = []
        for row, tree, row_logits in zip(rows, trees, logits, strict=True):
            node = rng.randrange(size)
            path = tree.path(node)
            assert_close(row_logits[node], oracle(model, row + [tree.tokens[i] for i in path]))
            kept.append(path[: rng.randint(0 if len(rows) > 1 else 1, len(path))])
        width = max(map(len, kept))
        cache.keep([path + [-1] * (width - len(path)) for path in kept], [len(path) for path in kept])
        for row, tree, path in zip(rows, trees, kept, strict=True):
            row += [tree.tokens[i] for i in path]
        assert cache.lengths == [len(row) for row in rows] == cache.lengths_tensor.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3-mixed"])
@pytest.mark.parametrize("lengths", [(13,), (3, 12)], ids=["one", "ragged"])
def test_a_tree_grown_level_by_level_equals_the_whole_tree(name, lengths):
    model, rng = tiny_model(name), random.Random(5)
    cache = make_cache(model, len(lengths))
    prefill(model, cache, random_rows(rng, lengths))
    tree = Tree([5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 2])
    tokens = torch.tensor([tree.tokens] * len(lengths))
    whole = forward(model, cache, tokens, tree.ancestors, tree.depths)
    cache.rollback(cache.lengths)
    for first, end in ((0, 1), (1, 3), (3, 6)):
        level = forward(
            model, cache, tokens[:, first:end], tree.ancestors[first:end, :end], tree.depths[:end], after=first
        )
        assert_close(level, whole[:, first:end])
    cache.keep([[0, 2, 5]] * len(lengths), [3] * len(lengths))
    assert cache.lengths == [n + 3 for n in lengths]


@pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "mistral-windowed", "gemma3-mixed"])
@pytest.mark.parametrize("new_tokens", [2, 20])
def test_a_stock_cache_is_taken_over_and_handed_back(name, new_tokens):
    model, rng = tiny_model(name), random.Random(1)
    prompts = torch.tensor(random_rows(rng, (4, 4)))
    theirs = DynamicCache(config=model.config)
    options = dict(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
    rows = model.generate(prompts, past_key_values=theirs, **options).tolist()
    cache = make_cache(model, 2)
    cache.load_dynamic(theirs)
    assert cache.lengths == [3 + new_tokens] * 2
    logits = forward(model, cache, [row[-1:] for row in rows])
    for row, row_logits in zip(rows, logits, strict=True):
        assert_close(row_logits[-1], oracle(model, row))
    cache.commit(1)

    rows = [[*rows[0], 11]]
    fresh = first_row(cache, DynamicCache(config=model.config))
    first_row(cache, theirs)
    assert theirs.get_seq_length() == fresh.get_seq_length() == len(rows[0]) - 1
    wanted = model.generate(torch.tensor(rows), **options)
    for stock in (fresh, theirs):
        assert torch.equal(model.generate(torch.tensor(rows), past_key_values=stock, **options), wanted)


def test_shared_key_value_layers_stay_empty_and_are_skipped():
    cache = SpeculativeCache(LayerKinds([None, None]), batch_size=1, capacity=32, block=8)
    cache.place(4)
    cache.update(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 5), 0)
    cache.keep([[0, 2]], [2])
    assert not cache.layers[1].is_initialized
    assert cache.num_bytes == 32 * 2 * (3 + 5) * 4
    config = AutoConfig.for_model("llama", **COMMON)
    assert first_row(cache, DynamicCache(config=config)).get_seq_length() == 2
