"""Runs that shall end at a given time: how many steps they get, and that a resumed one keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from chat_rows import CHAT
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.demo import target_path
from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.target import loading
from eagle31_hf.training import train
from eagle31_hf.training.plan import most_steps, steps_in_time
from eagle31_hf.training.settings import TrainingSettings


def taking(step_s: float, measurement_s: float, every: int):
    """Seconds of so many steps, with a measurement at the end and after every so many."""
    return lambda steps: steps * step_s + measurement_s * (steps // min(every, steps))


@given(st.floats(0.01, 5.0), st.floats(0.0, 9.0), st.integers(1, 50), st.floats(0.0, 900.0))
def test_one_more_step_would_be_too_many(step_s: float, measurement_s: float, every: int, left_s: float) -> None:
    seconds_of = taking(step_s, measurement_s, every)
    steps = most_steps(seconds_of, left_s)
    assert steps == 0 or seconds_of(steps) <= left_s
    assert seconds_of(steps + 1) > left_s


def test_a_resumed_run_keeps_its_steps(tmp_path: Path) -> None:
    PartialState(cpu=True)
    assert steps_in_time(tmp_path / "run", taking(1.0, 0.0, 1), 60.0, resume=False) == 60
    assert steps_in_time(tmp_path / "run", taking(1.0, 0.0, 1), 5.0, resume=True) == 60
    assert steps_in_time(tmp_path / "run", taking(1.0, 0.0, 1), 5.0, resume=False) == 5


def test_too_little_time_is_an_error(tmp_path: Path) -> None:
    PartialState(cpu=True)
    with pytest.raises(TrainingError, match=r"1\.0 of the minutes are left .* take 2\.0; give more minutes"):
        steps_in_time(tmp_path, taking(90.0, 30.0, 1), 60.0, resume=False)
    assert not list(tmp_path.iterdir())


def test_minutes_that_make_no_sense() -> None:
    told = TrainingSettings(target="t", prompts=("x.jsonl",), out=Path("out"))
    with pytest.raises(ConfigurationError, match=r"minutes is 0\.0; wanted more than 0"):
        replace(told, minutes=0.0).check()
    with pytest.raises(ConfigurationError, match="minutes is 8 and max_steps 5"):
        replace(told, minutes=8.0, max_steps=5).check()


def test_a_run_has_as_many_steps_as_its_minutes_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still and steps of two seconds."""
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: torch.float32)
    monkeypatch.setattr(train.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(train, "time_token_loss", lambda *_: (2.0, 1.0))
    monkeypatch.setattr(train, "time_measurement", lambda *_: 0.0)
    monkeypatch.setattr(train, "time_known_texts", lambda *_: 1.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), out=tmp_path / "out", regenerate="none", minutes=0.13,
        max_length=48, draft_vocab_size=256, batch_rows=1, device="cpu", eval_new_tokens=4,
    )  # fmt: skip
    report = train.train_drafter(told)
    assert [(stage.name, stage.steps) for stage in report.stages] == [("stage1", 3)]  # and a measurement: 7 of 7.8 s
