"""The study of texts that part in half precision: none does in float32, and a target that differs is counted."""

from __future__ import annotations

import json
from pathlib import Path

import parted_texts
import pytest
import torch


@pytest.mark.slow
@pytest.mark.thorough
def test_the_study_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "parted.json"
    parted_texts.main(["--texts", "2", "--new-tokens", "24", "--json", str(record)])
    rows = json.loads(record.read_text())["targets"]
    assert [row["target"] for row in rows] == [*parted_texts.TARGETS]
    assert all(row["parted"]["fp32"] == 0 for row in rows)
    monkeypatch.setattr(parted_texts, "drafted", lambda _drafter, ids, *_: ids)
    assert parted_texts.parted(parted_texts.DENSE, torch.float32, 2, 4) == 2, "or nothing is counted"
