"""What commands tell while they take their time, where no terminal shows a moving line."""

from __future__ import annotations

import io
import time
from contextlib import nullcontext
from unittest import mock

import pytest
from command_line import TARGET, error_of
from rich.console import Console

from eagle31_hf.cli import plan, progress
from eagle31_hf.errors import MemoryPlanError


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
    monkeypatch.setattr(progress, "QUIET_S", 0.2)
    with progress.waiting_for("looking for graphs") as say:
        say("compiling 1 graph: verify")
        time.sleep(0.4)
    assert capsys.readouterr().err == "compiling 1 graph: verify ...\n", "it is something else that is waited for now"
    monkeypatch.setattr(progress, "QUIET_S", 60.0)
    with progress.waiting_for("loading the models"):
        pass
    assert capsys.readouterr() == ("", "")


def test_measuring_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    out = Console(file=io.StringIO())
    with progress.progress_bar(out) as advance:
        advance("measuring", 1, 4)
        monkeypatch.setattr(progress, "LINE_EVERY_S", 60.0)
        advance("measuring", 2, 4)
    assert capsys.readouterr().err == "measuring: 1 of 4\n"
    assert out.file.getvalue() == "", "tables go there"  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=60)
    with progress.progress_bar(out) as advance:
        advance("measuring", 2, 4)
    assert "2 of 4" in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "waits_for"),
    [
        ("owner/name", "asking the Hub for owner/name, then planning"),
        (TARGET, "planning"),
        ("llama 3.1 8b", "planning"),
    ],
)
def test_a_plan_says_that_the_hub_is_asked(target: str, waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub tries for half a minute where there is no network."""
    told: list[str] = []
    monkeypatch.setattr(plan, "waiting_for", lambda what: told.append(what) or nullcontext())
    monkeypatch.setattr(plan, "plan_memory", mock.Mock(side_effect=MemoryPlanError("not now")))
    assert error_of("plan", target) == "error: not now"
    assert told == [waits_for]
