"""Documents packed into rows: each whole, and none sees another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from eagle31_hf.training.data import Document, PackedDocuments, pack
from eagle31_hf.training.objectives import compute_features
from families import recurrent_target
from helpers import random_drafter


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_packing_keeps_every_document_whole(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 20, seed=seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 20 for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // 20)
    assert pack(lengths, 20, seed=seed) == rows


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "nemotron_h", "lfm2"])
def test_packed_documents_do_not_see_each_other(family: str, target, drafter) -> None:
    """Neither by attention nor in recurrent states."""
    if family != "llama":
        target = recurrent_target(family)
        drafter = random_drafter(target, aux_layers=[1, 2, 3])
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.vocab_size - 10
    documents = [
        Document(str(i), torch.randint(3, vocabulary, (length,), generator=generator).tolist(), [True] * length)
        for i, length in enumerate((9, 5, 7, 6))
    ]
    data = PackedDocuments(documents, 16, seed=1)
    rows = default_collate([data[i] for i in range(len(data))])
    packed = compute_features(drafter.binding, rows["input_ids"], rows["position_ids"])
    for index, numbers in enumerate(data.rows):
        start = 0
        for number in numbers:
            ids = torch.tensor([documents[number].input_ids])
            alone = compute_features(drafter.binding, ids, torch.arange(ids.shape[1])[None])
            at = slice(start, start + ids.shape[1])
            assert torch.allclose(packed.logits[index, at], target(ids).logits[0], atol=1e-3)
            assert torch.allclose(packed.aux[index, at], alone.aux[0], atol=1e-3)
            start += ids.shape[1]
    assert max(map(len, data.rows)) > 1
