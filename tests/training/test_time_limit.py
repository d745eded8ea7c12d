"""Runs that shall end at a given time: how many steps they get, and that a resumed one keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_rows import CHAT

from eagle31_hf.demo import target_path
from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.targets import loading
from eagle31_hf.training import train
from eagle31_hf.training.settings import TrainingSettings


def test_minutes_that_make_no_sense() -> None:
    told = TrainingSettings(target="t", prompts=("x.jsonl",), out=Path("out"))
    with pytest.raises(ConfigurationError, match=r"minutes is 0\.0; wanted more than 0"):
        replace(told, minutes=0.0).check()
    with pytest.raises(ConfigurationError, match=r"minutes is 8\.0 and max_steps 5"):
        replace(told, minutes=8.0, max_steps=5).check()


def test_a_run_has_as_many_steps_as_its_minutes_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still and steps of two seconds; a resumed run keeps its steps."""
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: torch.float32)
    monkeypatch.setattr(train.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(train, "time_step", lambda *_, **__: 2.0)
    monkeypatch.setattr(train, "time_measurement", lambda *_: 1.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), out=tmp_path / "out", regenerate="none", minutes=0.13,
        max_length=48, draft_vocab_size=256, batch_rows=1, device="cpu",
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"0\.0 of the minutes are left .* take 0\.1; give more minutes"):
        train.train_drafter(replace(told, minutes=0.04))
    report = train.train_drafter(told)
    assert [(stage.name, stage.steps) for stage in report.stages] == [("stage1", 3)]  # and a measurement: 7 of 7.8 s
    resumed = train.train_drafter(replace(told, minutes=0.5, resume=True))
    assert resumed.plan.steps == 3
