"""`eagle31 train` stopped from outside, at a bad moment, and told to go on: what it would have made uninterrupted."""

from __future__ import annotations

import json
import re
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import write_rows
from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.demo import target_path
from warm_processes import finish, run_command, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits another process by prlimit"),
]

STEPS = 6


def words_for(out: Path, *options: str) -> list[str]:
    """What `eagle31` is told."""
    out.parent.mkdir(exist_ok=True)
    places = ["--prompts", str(write_rows(out.parent)), "--out", str(out)]
    tiny = "--regenerate none --max-length 48 --draft-vocab-size 256 --batch-rows 2 --device cpu --dtype float32"
    steps = f"--max-steps {STEPS} --eval-steps 1"
    return ["train", str(target_path()), *places, *tiny.split(), *steps.split(), *options]


def wait_for(path: Path, process: BaseProcess, log: Path) -> None:
    while not path.exists():
        assert process.is_alive(), log.read_text()[-2000:]
        time.sleep(0.002)


def losses(out: Path) -> dict[int, float]:
    state = json.loads((out / "stage1" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def fill_the_disk(process: BaseProcess) -> None:
    """From now on no file of it can grow past 64 KiB, which a checkpoint is larger than."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


INTERRUPTIONS: dict[str, Callable[[BaseProcess], None]] = {
    "SIGTERM": lambda process: process.terminate(),
    "SIGKILL": lambda process: process.kill(),
    "full disk": fill_the_disk,
}


@pytest.mark.thorough
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """One run is stopped in each way, later every time, and told to go on."""
    whole, out = tmp_path / "whole" / "out", tmp_path / "stopped" / "out"
    for step, (interruption, stop) in zip((2, 4, 5), INTERRUPTIONS.items(), strict=True):  # the first ends at step 3
        log = tmp_path / f"{step}.log"
        process = start(run_command, words_for(out, *(["--resume"] if step > 2 else [])), log=log)
        wait_for(out / "stage1" / f"checkpoint-{step}", process, log)  # while its files are being written
        stop(process)
        code, said = finish(process), log.read_text()
        assert code != 0, interruption
        if interruption == "SIGTERM":
            assert code == 128 + signal.SIGTERM
            assert re.search(r"stopped; kept in .*: stage1 up to step \d; ", said), said[-2000:]
        else:
            assert re.search(r"resuming  stage1 up to step \d", said), said[-2000:]
        if interruption == "full disk":
            told = " ".join(said.split())
            assert "cannot be written" in told, said[-2000:]
            assert "Traceback" not in told, said[-2000:]
        assert not (out / "model.safetensors").exists(), "it was stopped before its end"
    torch.set_num_threads(1)  # as in the processes
    for words in (words_for(whole), words_for(out, "--resume")):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output[-2000:]
    assert list(losses(whole)) == list(range(1, STEPS + 1))
    assert losses(out) == losses(whole)
    made, wanted = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert made.keys() == wanted.keys()
    assert all(made[name].equal(wanted[name]) for name in wanted)
