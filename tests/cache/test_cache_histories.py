"""Whatever was written, kept, cut and picked: the cache holds what a list of lists holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.errors import UnsupportedGenerationError


@dataclass
class Mirror:
    """The cache beside plain Python lists. Keys and values are the token number itself."""

    windows: list[int | None]
    rows: list[list[int]]
    slab: int | None
    cache: SpeculativeCache = field(init=False)
    next_token: int = 1

    def __post_init__(self):
        self.cache = SpeculativeCache(
            self.windows,
            batch_size=len(self.rows),
            capacity=96,
            block=8,
            slab=self.slab,
            layer_types=["sliding_attention" if w else "full_attention" for w in self.windows],
        )

    def write(self, num_tokens: int, after: int = 0) -> torch.Tensor:
        """Write unique tokens through every layer, `(B, T)`."""
        size = len(self.rows) * num_tokens
        tokens = torch.arange(self.next_token, self.next_token + size).view(-1, num_tokens)
        self.next_token += size
        self.cache.place(num_tokens, after=after)
        keys = tokens[:, None, :, None].float()
        for layer in range(len(self.windows)):
            self.cache.update(keys.expand(-1, 2, -1, 3), -keys.expand(-1, 2, -1, 5), layer)
        return tokens

    def check(self):
        lengths = [len(row) for row in self.rows]
        assert self.cache.lengths == lengths == self.cache.lengths_tensor.tolist()
        for layer, window in zip(self.cache.layers, self.windows, strict=True):
            if not layer.is_initialized:
                continue
            for b, row in enumerate(self.rows):
                ring = len(row) if window is None else max(window - 1, 1)
                for position in range(max(0, len(row) - ring), len(row)):
                    slot = position if window is None else position % ring
                    assert (layer.keys[b, :, slot] == row[position]).all()
                    assert (layer.values[b, :, slot] == -row[position]).all()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_histories_equal_a_list_of_lists(data):
    draw = data.draw
    batch_size = draw(st.integers(1, 3))
    mirror = Mirror([None, 4, None, 4], [[] for _ in range(batch_size)], draw(st.sampled_from([None, 5])))
    for _ in range(draw(st.integers(1, 10))):
        rows = mirror.rows
        if max(map(len, rows)) > 80:
            break
        after = draw(st.integers(0, 3))
        tokens = mirror.write(draw(st.integers(1, 5)))
        if after:
            tokens = torch.cat([tokens, mirror.write(after, after=tokens.shape[1])], dim=1)
        size = tokens.shape[1]
        action = draw(st.sampled_from(["keep", "keep tensor", "commit", "forget", "select", "crop"]))
        if action.startswith("keep"):
            sets = [draw(st.sets(st.integers(0, size - 1))) for _ in rows]
            paths = [sorted(nodes) for nodes in sets]
            padded = [path + [-1] * (size - len(path)) for path in paths]
            counts = [len(path) for path in paths]
            mirror.cache.keep(torch.tensor(padded) if action == "keep tensor" else padded, counts)
            for b, path in enumerate(paths):
                rows[b] += tokens[b, path].tolist()
        elif action == "commit":
            counts = [draw(st.integers(0, size)) for _ in rows]
            mirror.cache.commit(counts)
            for b, count in enumerate(counts):
                rows[b] += tokens[b, :count].tolist()
        elif action == "forget":
            mirror.cache.rollback(mirror.cache.lengths)
        elif action == "select":
            picked = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            mirror.cache.select_rows(picked)
            mirror.rows = [list(rows[b]) for b in picked]
        else:
            wanted = [draw(st.integers(0, len(row))) for row in rows]
            # A ring of 3 gives back only rows it never overwrote.
            if all(n in (0, len(row)) or len(row) <= 3 for n, row in zip(wanted, rows, strict=True)):
                mirror.cache.rollback(wanted)
                mirror.rows = [row[:n] for n, row in zip(wanted, rows, strict=True)]
            else:
                with pytest.raises(UnsupportedGenerationError, match="sliding-window"):
                    mirror.cache.rollback(wanted)
                mirror.cache.rollback(mirror.cache.lengths)
        mirror.check()


def test_full_layers_roll_back_to_any_length():
    mirror = Mirror([None, None], [[], []], None)
    rng = random.Random(0)
    for _ in range(30):
        tokens = mirror.write(6)
        counts = [rng.randint(0, 6) for _ in range(2)]
        mirror.cache.commit(counts)
        mirror.rows = [row + new[:n].tolist() for row, new, n in zip(mirror.rows, tokens, counts, strict=True)]
        lengths = [rng.randint(len(row) // 2, len(row)) for row in mirror.rows]
        mirror.cache.rollback(lengths)
        mirror.rows = [row[:n] for row, n in zip(mirror.rows, lengths, strict=True)]
        mirror.check()
    mirror.cache.rollback([len(row) - 2 for row in mirror.rows])
    mirror.rows = [row[:-2] for row in mirror.rows]
    mirror.check()
    mirror.cache.reset()
    assert mirror.cache.lengths == [0, 0]


@pytest.mark.parametrize("slab", [None, 16])
def test_buffers_stay_where_they_are(slab):
    mirror = Mirror([None, 4], [[]], slab)
    pointers = []
    for _ in range(20):
        mirror.write(4)
        mirror.cache.attention_mask(torch.ones(4, 4).tril().bool())
        mirror.cache.keep([[0, 3]], [2])
        held = [t.data_ptr() for layer in mirror.cache.layers for t in (layer.keys, layer.values)]
        pointers.append((*held, mirror.cache._masks.resident._buffer.data_ptr()))
    assert mirror.cache.lengths == [40]
    # 2 tokens a round and 4 on top: slabs of 16 are outgrown at 44 slots twice, full size never.
    assert len(set(pointers)) == (1 if slab is None else 3)
    assert mirror.cache.layers[0].keys.shape[2] == (96 if slab is None else 48)
    assert mirror.cache.layers[1].keys.shape[2] == 3 + 8


def test_a_failed_commit_of_a_ring_is_not_rolled_back_silently(monkeypatch):
    mirror = Mirror([4, 4], [[]], None)
    mirror.write(8)
    mirror.cache.commit(8)
    mirror.write(4)

    def fail(*_):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(mirror.cache.layers[1], "copy", fail)
    with pytest.raises(torch.OutOfMemoryError):
        mirror.cache.commit(2)
    with pytest.raises(UnsupportedGenerationError, match="prefill"):
        mirror.cache.rollback([8])
    mirror.cache.rollback([0])
