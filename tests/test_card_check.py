"""The check of a CUDA card, tried on a CPU: every step of it, and what becomes of a step that goes wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
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
    """The module, with nothing to import and no shortest time."""
    monkeypatch.syspath_prepend(str(CHECK.parent))
    module = importlib.import_module("card_check.driver")
    monkeypatch.setattr(module, "import_all", lambda machine: True)
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
    recorded = [by_name["pair"][f"captured, generation {turn}"]["recorded"] for turn in (1, 2, 3)]
    assert recorded[0] > 0
    assert recorded[1:] == [0, 0]


def test_a_name_that_is_no_step() -> None:
    done = run("--only", "par")
    assert done.returncode == 2
    assert done.stderr.startswith("got par; wanted some of env, pair,")


def test_steps_fail_alone_and_leave_what_they_found(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fake:
        def __init__(self, work: Any, limit_s: float = 60):
            self.run, self.limit_s = work, limit_s

    def raises(machine: Any, notes: Any) -> None:
        notes.put("first", 1)
        raise ValueError("two\nlines")

    def hangs(machine: Any, notes: Any) -> None:
        notes.put("before", 1)
        time.sleep(60)

    def fails_in_part(machine: Any, notes: Any) -> None:
        notes.attempt("wrong", lambda: {}["key"])
        notes.attempt("right", lambda: 5)

    works = {"raises": raises, "hangs": hangs, "part": fails_in_part, "good": lambda m, notes: notes.put("x" * 20, 1)}
    monkeypatch.setattr(
        driver, "STEPS", {name: Fake(work, 1 if name == "hangs" else 60) for name, work in works.items()}
    )
    machine = importlib.import_module("card_check.machine").Machine("cpu", False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert driver.Driver(machine, tmp_path / "out", scratch, budget_s=100).run() == 1
    raised, hung, part, good = results_in(tmp_path / "out")
    assert (raised["status"], raised["failed"], raised["found"]["first"]) == (1, ["step"], 1)
    assert raised["found"]["step"]["FAILED"]["error"] == "ValueError: two"
    assert (hung["status"], hung["why"], hung["found"]) == (124, "stopped after 1 s", {"before": 1})
    assert (part["status"], part["failed"], part["found"]["right"]) == (0, ["wrong"], 5)
    assert (good["status"], good["failed"]) == (0, [])
    assert "## part: 1 failed" in (tmp_path / "out" / "summary.txt").read_text()
    assert driver.Driver(machine, tmp_path / "again", scratch, budget_s=100).run(only=("good",)) == 0


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_how_close_two_tokens_were(penalty: float, driver: Any) -> None:
    """In the row that parts, of prompts padded to one length, by the scores that the penalty leaves."""
    worst_tie = importlib.import_module("card_check.embedded").worst_tie
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
