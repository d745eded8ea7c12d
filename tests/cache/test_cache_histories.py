"""Whatever was written, kept, dropped and picked: the cache holds what a list of lists holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror import DTYPES, Mirror

from eagle31_hf.cache.kept_buffers import KeptBuffers


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
