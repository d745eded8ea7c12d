"""The target's features on disk: they train as those computed on the way, and are refused where made otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from eagle31_hf.errors import TrainingError
from eagle31_hf.training.data.disk import require_disk
from eagle31_hf.training.data.packing import PackedDocuments, collate
from eagle31_hf.training.data.rendering import Document
from eagle31_hf.training.distillation.features import MANIFEST, FeatureManifest, StoredFeatures, store_features
from eagle31_hf.training.distillation.training_model import DistillationModel
from eagle31_hf.training.settings import DistillationSettings


def make_documents(count: int = 5) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [
        Document(str(i), torch.randint(3, 8000, (6 + i,), generator=generator).tolist(), [True] * (6 + i))
        for i in range(count)
    ]


def test_stored_features_train_as_online_ones(tmp_path: Path, drafter) -> None:
    documents, binding = make_documents(), drafter.require_binding()
    store_features(binding, documents, tmp_path, tokens_per_shard=16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stored = StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    online = PackedDocuments(documents, 16, seed=0)
    model = DistillationModel(drafter, DistillationSettings(steps=2))
    with torch.no_grad():
        ours = model(**collate([stored[i] for i in range(2)])).steps
        theirs = model(**collate([online[i] for i in range(2)])).steps
    assert ours.sums.tolist() == pytest.approx(theirs.sums.tolist(), rel=1e-4)
    assert ours.supervised == theirs.supervised > 0


def test_storing_goes_on_where_it_was_stopped(tmp_path: Path, drafter) -> None:
    documents, binding = make_documents(), drafter.require_binding()
    store_features(binding, documents, tmp_path, tokens_per_shard=16)
    shards = sorted(tmp_path.glob("*.safetensors"))
    before = {shard: shard.read_bytes() for shard in shards}
    shards[1].unlink()
    with pytest.raises(TrainingError, match="lacks features-00001"):
        StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    done: list[tuple[int, int]] = []
    store_features(binding, documents, tmp_path, tokens_per_shard=16, on_tokens=lambda *told: done.append(told))
    in_all = sum(len(document.input_ids) for document in documents)
    assert 0 < done[0][0] < in_all, "those of the shards that are there"
    assert done[-1] == (in_all, in_all)
    assert {shard: shard.read_bytes() for shard in shards} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "another/model"),
        ("aux_layers", [1, 5, 8]),
        ("head_input", "pre_norm"),
        ("dtype", "float16"),
        ("quantization", "nf4"),
        ("documents", "0"),
    ],
)
def test_features_made_otherwise_are_refused(tmp_path: Path, drafter, field: str, value) -> None:
    documents, binding = make_documents(2), drafter.require_binding()
    store_features(binding, documents, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, field: value}))
    with pytest.raises(TrainingError, match=f"made otherwise \\({field}: stored"):
        StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    with pytest.raises(TrainingError, match=field):
        store_features(binding, documents, tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(TrainingError, match="no readable feature manifest"):
        store_features(binding, documents, tmp_path)


def test_too_little_disk_is_said_before_writing(tmp_path: Path, drafter, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(TrainingError, match=r"needs .* GB, but .* free"):
        store_features(drafter.require_binding(), make_documents(), tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))
    with pytest.raises(TrainingError, match="checkpoints needs"):
        require_disk(tmp_path / "a" / "b", 10**6, "keeping checkpoints")
