"""Rows that come and go: a row that leaves is kept, and only what is written is moved."""

import torch
from transformers import LlamaConfig

from eagle31_hf.cache.row_pool import RowPool, resume_row
from eagle31_hf.cache.speculative import SpeculativeCache

SIZES = {"capacity": 64, "block": 8, "slab": None, "device": torch.device("cpu")}
CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=8, head_dim=4
)  # fmt: skip


def row_of(length, value):
    """A cache of one row: `length` tokens whose keys and values are all this value."""
    made = SpeculativeCache.from_config(CONFIG, batch_size=1, **SIZES)
    made.place(length)
    for layer in range(CONFIG.num_hidden_layers):
        states = torch.full((1, 1, length, 4), float(value))
        made.update(states, -states, layer)
    made.commit([length])
    return made


def test_a_row_that_leaves_changes_places_with_the_last_one_and_nothing_unwritten_is_moved():
    pool = RowPool.from_config(CONFIG, batch_size=3, **SIZES)
    for length, value in ((5, 1), (7, 2), (3, 3)):
        pool.join(row_of(length, value))
    keys = pool.layers[0].keys
    keys[0, :, 10:], keys[2, :, 10:] = 8, 9  # behind what any row holds
    assert pool.leave(0) == 2
    assert pool.lengths == [3, 7]
    assert [pool.row_length(place) for place in range(3)] == [3, 7, 5]
    assert keys[0, 0, :3, 0].tolist() == [3, 3, 3]
    assert keys[2, 0, :5, 0].tolist() == [1] * 5
    assert keys[0, :, 10:].unique().tolist() == [8]
    assert keys[2, :, 10:].unique().tolist() == [9]
    again = row_of(1, 0)
    resume_row(again, pool, 2, 4)
    assert again.lengths == [4]
    assert again.layers[1].values[0, 0, :4, 0].tolist() == [-1] * 4
