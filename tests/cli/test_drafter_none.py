"""`--drafter none`: who writes without a drafter, and who has nothing to do without one."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import DRAFTER, PROMPT, TARGET, run
from typer.testing import CliRunner

from eagle31_hf.cli import app

ALONE = ("--target", TARGET, "--drafter", "none", "--dtype", "float32")


def test_generate_writes_the_same_text_without_a_drafter(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    asked = ("generate", "--target", TARGET, "--dtype", "float32", "--prompt", PROMPT, "--max-new-tokens", 24)
    out = run(*asked, "--drafter", "none", "--json", path).stdout
    with_drafter = run(*asked, "--drafter", DRAFTER, "--no-compare").stdout
    answer = next(line for line in out.splitlines() if line.startswith("assistant: "))
    assert answer in with_drafter.splitlines()
    stats = json.loads(path.read_text())["stats"]
    assert stats["loop"] == "own"
    assert 0 < stats["new_tokens"] <= 24


def test_chat_without_a_drafter() -> None:
    asked = ["chat", *ALONE, "--max-new-tokens", "8"]
    out = CliRunner().invoke(app, asked, input="Hello!\n", env={"COLUMNS": "100"})
    assert out.exit_code == 0, out.output
    assert "acceptance length" in out.stdout


def test_a_plan_without_a_drafter(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", TARGET, "--drafter", "none", "--card", "RTX 4090", "--json", path)
    assert json.loads(path.read_text())["settings"]["draft_tokens"] == 0


def test_a_planned_target_alone(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run("generate", *ALONE, "--memory", "auto", "--context", 256, "--prompt", PROMPT, "--max-new-tokens", 8,
        "--json", path)  # fmt: skip
    record = json.loads(path.read_text())
    assert record["plan"]["settings"]["draft_tokens"] == 0
    assert record["stats"]["loop"] == "own"
