"""The check of a CUDA card, tried on a CPU: every step of it, and what becomes of a step that goes wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import left_padded, random_prompts, target_of

CHECK = Path(__file__).parents[1] / "examples" / "card_check"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """As on a bare machine: the script finds the package by itself."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
    return subprocess.run([sys.executable, str(CHECK), *options], capture_output=True, text=True, env=environment)


def results_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without a shortest time."""
    monkeypatch.syspath_prepend(str(CHECK.parent))
    module = importlib.import_module("card_check.driver")
    monkeypatch.setattr(module, "SHORTEST_S", 0)
    return module


@pytest.mark.slow
def test_every_step_runs(driver: Any, tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--budget", "1200", "--out", str(tmp_path))
    results = results_in(tmp_path)
    wrong = {each["step"]: [each["why"], each["failed"], each["found"]] for each in results if each["failed"]}
    assert not wrong, done.stdout
    assert [each["step"] for each in results] == list(driver.STEPS)
    assert [each["status"] for each in results] == [0] * len(results)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "log.txt", "summary.txt"}
    assert all(f"## {name}: ok" in done.stdout for name in driver.STEPS)
    by_name = {each["step"]: each["found"] for each in results}
    assert by_name["texts"]["texts, torch.float32"]["right"] == 8
    assert by_name["serve"]["2 clients, tok/s"] > 0
    assert by_name["large"]["chain of 3, eager"]["tokens/round"] > 1.5, "drafts are accepted"


def test_a_name_that_is_no_step() -> None:
    done = run("--only", "par")
    assert done.returncode == 2
    assert done.stderr.startswith("got par; wanted some of texts, rounds,")


WORKS = """
import time

def raises(machine, notes):
    notes.put("first", 1)
    raise ValueError("two\\nlines")

def hangs(machine, notes):
    notes.put("before", 1)
    time.sleep(60)

def part(machine, notes):
    notes.attempt("wrong", lambda: {}["key"])
    notes.attempt("right", lambda: 5)

def good(machine, notes):
    notes.put("x" * 20, 1)
"""
STEPS = {name: ("works", name, 15 if name == "hangs" else 60) for name in ("raises", "hangs", "part", "good")}
RUN_ONE = f"""
import sys
from pathlib import Path
from card_check import driver
from card_check.machine import Machine
sys.modules["card_check.works"] = __import__("works")
driver.STEPS = {STEPS}
sys.exit(driver.run_one(sys.argv[2], Machine("cpu", False), Path(sys.argv[4])))
"""


def test_steps_fail_alone_and_leave_what_they_found(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "works.py").write_text(WORKS)
    (tmp_path / "run_one.py").write_text(RUN_ONE)
    monkeypatch.setenv("PYTHONPATH", f"{CHECK.parent}:{tmp_path}")
    monkeypatch.setattr(driver, "STEPS", STEPS)
    monkeypatch.setattr(driver, "COMMAND", [sys.executable, str(tmp_path / "run_one.py")])
    machine = driver.Machine("cpu", False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert driver.run(machine, tmp_path / "out", scratch, 100) == 1
    raised, hung, part, good = results_in(tmp_path / "out")
    assert (raised["status"], raised["failed"], raised["found"]["first"]) == (1, ["step"], 1)
    assert raised["found"]["step"]["FAILED"]["error"] == "ValueError: two"
    assert (hung["status"], hung["why"], hung["found"]) == (124, "stopped after 15 s", {"before": 1})
    assert (part["status"], part["failed"], part["found"]["right"]) == (0, ["wrong"], 5)
    assert (good["status"], good["failed"]) == (0, [])
    assert "## part: 1 failed" in (tmp_path / "out" / "summary.txt").read_text()
    assert driver.run(machine, tmp_path / "again", scratch, 100, only=("good",)) == 0


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_how_close_two_tokens_were(penalty: float, driver: Any) -> None:
    """In the row that parts, of prompts padded to one length, by the scores that the penalty leaves."""
    worst_tie = importlib.import_module("card_check.texts").worst_tie
    target, prompts = target_of("llama"), left_padded(random_prompts(3))
    plain = target.generate(
        **prompts, max_new_tokens=6, do_sample=False, pad_token_id=0, repetition_penalty=penalty,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    ours, step, row = plain.sequences.clone(), 3, 1
    assert worst_tie(target, prompts["attention_mask"], plain.sequences, ours, penalty) == 0
    scores = plain.scores[step][row]
    second = int(scores.topk(2).indices[1])
    ours[row, prompts["input_ids"].shape[1] + step :] = second
    gap = float((scores.max() - scores[second]) / (scores.max() - scores.min()))
    found = worst_tie(target, prompts["attention_mask"], plain.sequences, ours, penalty)
    assert torch.tensor(found).allclose(torch.tensor(gap), atol=1e-5)
