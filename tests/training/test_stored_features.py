"""The target's features on disk: they train as those computed on the way, and none made otherwise is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.errors import TrainingError
from eagle31_hf.training.data.packing import PackedDocuments, collate
from eagle31_hf.training.data.rendering import Document
from eagle31_hf.training.distillation import features
from eagle31_hf.training.distillation.features import StoredFeatures, TargetFeatures, compute_features
from eagle31_hf.training.distillation.training_model import DistillationModel
from eagle31_hf.training.settings import DistillationSettings


def make_rows(count: int = 5) -> PackedDocuments:
    generator = torch.Generator().manual_seed(1)
    documents = [
        Document(str(i), torch.randint(3, 8000, (6 + i,), generator=generator).tolist(), [True] * (6 + i))
        for i in range(count)
    ]
    return PackedDocuments(documents, 16, seed=0)


def store(folder: Path, drafter: Eagle31Drafter) -> tuple[StoredFeatures, list[int]]:
    """The features of some rows, and what was told while they were stored."""
    binding, rows, told = drafter.binding, make_rows(), []
    stored = StoredFeatures(rows, folder, binding)
    stored.store(binding, range(len(rows)), on_rows=told.append)
    return stored, told


def test_stored_features_train_as_online_ones(tmp_path: Path, drafter) -> None:
    stored, _ = store(tmp_path, drafter)
    online = make_rows()
    model = DistillationModel(drafter, DistillationSettings(steps=2))
    with torch.no_grad():
        ours = model(**collate([stored[i] for i in range(2)])).steps
        theirs = model(**collate([online[i] for i in range(2)])).steps
    assert ours.sums.tolist() == pytest.approx(theirs.sums.tolist(), rel=1e-4)
    assert ours.counts.tolist() == theirs.counts.tolist()
    assert ours.counts.min() > 0


def test_storing_goes_on_where_it_was_stopped(tmp_path: Path, drafter) -> None:
    _, told = store(tmp_path, drafter)
    files = sorted(tmp_path.iterdir())
    assert told == [0] + [1] * len(files)
    assert len(files) > 1
    before = {file: file.read_bytes() for file in files}
    files[1].unlink()
    assert store(tmp_path, drafter)[1] == [len(files) - 1, 1], "those that are there, then what was missing"
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        ("model", "name_or_path", "another/model"),
        ("config", "_commit_hash", "0"),
        ("config", "quantization_config", {"quant_method": "nf4"}),
        ("binding", "aux_layers", (1, 5, 8)),
        ("binding", "compute_dtype", torch.float16),
    ],
)
def test_features_made_otherwise_are_not_read(tmp_path: Path, drafter, monkeypatch, owner: str, field: str, value):
    stored, _ = store(tmp_path, drafter)
    binding = drafter.binding
    monkeypatch.setattr({"model": binding.model, "config": binding.model.config, "binding": binding}[owner], field,
                        value, raising=False)  # fmt: skip
    other = StoredFeatures(stored.rows, tmp_path, binding)
    with pytest.raises(FileNotFoundError):
        other[0]


def test_a_target_that_changes_its_logits_is_refused(tmp_path: Path, drafter, monkeypatch) -> None:
    def capped(*row) -> TargetFeatures:
        found = compute_features(*row)
        return found._replace(logits=found.logits.tanh())

    monkeypatch.setattr(features, "compute_features", capped)
    with pytest.raises(TrainingError, match="changes its logits after the LM head"):
        store(tmp_path, drafter)
    assert not list(tmp_path.iterdir())


def test_too_little_disk_is_said_before_writing(tmp_path: Path, drafter, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(TrainingError, match=r"hidden states of \d rows needs .* GB, but .* free"):
        store(tmp_path / "new", drafter)
    assert not (tmp_path / "new").exists()
