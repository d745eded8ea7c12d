"""What is imported before a command needs it: nothing heavy. Counted, not timed."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from eagle31_hf.cli.app import COMMANDS, LazyCommand
from eagle31_hf.demo import drafter_path, target_path

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors", "psutil", "matplotlib", "fastapi")
TELL = "import json, sys, atexit; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))"


def imported_by(code: str) -> set[str]:
    """Modules that a fresh Python has imported when it has run `code`."""
    done = subprocess.run([sys.executable, "-c", f"{TELL}\n{code}"], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["no-such-command"]])
def test_the_list_of_commands_needs_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{TELL}\nfrom eagle31_hf.cli import main; main()", *words],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    modules = set(json.loads(done.stderr.splitlines()[-1]))
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


@pytest.mark.parametrize(
    ("words", "told"), [(["inspect", str(drafter_path())], b"starting"), (["plan", str(target_path())], b"planning")]
)
def test_a_terminal_is_told_what_is_waited_for(words: list[str], told: bytes) -> None:
    command = [sys.executable, "-c", "from eagle31_hf.cli import main; main()", *words]
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(theirs)  # so that reading ends, with an error, where nothing was told
    seen = b""
    while told not in seen:
        seen += os.read(ours, 4096)
