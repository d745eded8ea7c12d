"""What commands tell while they take their time, where no terminal shows a moving line."""

from __future__ import annotations

import time

import pytest

from eagle31_hf.cli import progress


def test_a_long_wait_leaves_a_line_and_a_short_one_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with progress.waiting_for("loading the models") as say:
        deadline = time.monotonic() + 10
        while "loading" not in (told := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
        say("compiling 3 graphs: verify")
    assert told == "loading the models ...\n"
    assert capsys.readouterr().err == "compiling 3 graphs: verify ...\n"
    monkeypatch.setattr(progress, "QUIET_S", 60.0)
    with progress.waiting_for("loading the models"):
        pass
    assert capsys.readouterr() == ("", "")
