"""Documents packed into rows: each whole, and none sees another."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.training.data.packing import PackedDocuments, collate, pack
from eagle31_hf.training.data.rendering import Document
from eagle31_hf.training.distillation.features import compute_features


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_packing_keeps_every_document_whole(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 20, seed=seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 20 for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // 20)
    assert pack(lengths, 20, seed=seed) == rows


def test_packed_documents_do_not_see_each_other(target, drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(str(i), torch.randint(3, 8000, (length,), generator=generator).tolist(), [True] * length)
        for i, length in enumerate((9, 5, 7, 6))
    ]
    data = PackedDocuments(documents, 16, seed=1)
    rows = collate([data[i] for i in range(len(data))])
    packed = compute_features(drafter.require_binding(), rows["input_ids"], rows["position_ids"])
    for index, numbers in enumerate(data.rows):
        start = 0
        for number in numbers:
            ids = torch.tensor([documents[number].input_ids])
            alone = target(ids).logits[0]
            assert torch.allclose(packed.logits[index, start : start + ids.shape[1]], alone, atol=1e-3)
            start += ids.shape[1]
    assert max(map(len, data.rows)) > 1
