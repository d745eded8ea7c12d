"""What a command does first: nothing heavy is imported before it is needed (counted, not timed), and what takes its
time is told, also where no terminal shows a moving line."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest import mock

import pytest
from command_line import DRAFTER, TARGET, error_of
from rich.console import Console

from eagle31_hf.cli import plan, progress
from eagle31_hf.cli.app import COMMANDS, LazyCommand
from eagle31_hf.errors import MemoryPlanError

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors", "psutil", "matplotlib", "fastapi")
TELL = "import json, sys, atexit; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))"


def imported_by(code: str, *words: str) -> set[str]:
    """Modules that a fresh Python has imported when it has run `code`."""
    command = [sys.executable, "-c", f"{TELL}\n{code}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["no-such-command"]])
def test_the_list_of_commands_needs_nothing_heavy(words: list[str]) -> None:
    modules = imported_by("from eagle31_hf.cli import main; main()", *words)
    assert "eagle31_hf.cli.app" in modules, "or nothing was tried"
    assert not modules.intersection(HEAVY)


def test_the_package_is_imported_without_what_it_is_made_of() -> None:
    assert not imported_by("import eagle31_hf; eagle31_hf.__version__; dir(eagle31_hf)").intersection(HEAVY)


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "eagle31_hf", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("eagle31-hf ")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_listed_of_a_command_is_what_it_says_itself(name: str) -> None:
    real = LazyCommand(name=name, callback=None).load()
    assert (real.help or "").split("\n\n")[0].replace("\n", " ") == COMMANDS[name][1]


@pytest.mark.parametrize(("words", "told"), [(["inspect", DRAFTER], b"starting"), (["plan", TARGET], b"planning")])
def test_a_terminal_is_told_what_is_waited_for(words: list[str], told: bytes) -> None:
    command = [sys.executable, "-c", "from eagle31_hf.cli import main; main()", *words]
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(theirs)  # so that reading ends, with an error, where nothing was told
    seen = b""
    while told not in seen:
        seen += os.read(ours, 4096)


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


def test_measuring_says_now_and_then_how_far_it_is_and_a_terminal_gets_a_bar(
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
