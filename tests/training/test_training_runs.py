"""Whole runs of training: from prompts to a drafter, by one process and by two, and on after an interruption."""

from __future__ import annotations

import io
import json
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import fields, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_training import make_drafter, make_target, run_of, training, write_rows
from typer.testing import CliRunner

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints.card import fill_card
from eagle31_hf.cli import app
from eagle31_hf.demo import target_path
from eagle31_hf.drafter import loading
from eagle31_hf.errors import Eagle31Error, TrainingError
from eagle31_hf.training import train
from eagle31_hf.training.measure import EvaluationPrompt
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import train_drafter
from warm_processes import finish, run_command, start, start_group


@pytest.mark.slow
def test_from_prompts_to_a_drafter_and_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that computes in float32; the drafter is stored as its target is."""
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: torch.float32)
    told = training(write_rows(tmp_path), tmp_path / "out", max_new_tokens=10, max_steps=2, eval_steps=1, license="mit")
    report = train_drafter(told)
    (stage,) = report.record["stages"]
    assert (stage["name"], stage["steps"]) == ("stage1", 2)
    drafter = Eagle31Drafter.from_pretrained(told.out)
    assert drafter.dtype == torch.bfloat16
    assert drafter.config.is_eagle31
    assert drafter.config.draft_vocab_size == 256
    card = fill_card(told.out, "owner/drafter")
    assert all(word in card for word in ("vllm serve", "sglang", "stage1", "assistant_model", "without a drafter"))
    assert str(tmp_path) not in card
    record = (told.out / "training_report.json").read_text()
    assert json.loads(record)["data"] == ["rows.jsonl"]
    assert str(tmp_path) not in record
    with pytest.raises(TrainingError, match=r"holds an earlier run .*go on with --resume, begin anew with --fresh"):
        train_drafter(told)
    weights = (told.out / "model.safetensors").read_bytes()
    console = Console(file=io.StringIO(), width=200)
    for steps in (2, 1):
        again = train_drafter(replace(told, resume=True, max_steps=steps), console=console)
        assert again == report, "finished before: not trained again"
    assert (told.out / "model.safetensors").read_bytes() == weights
    said = console.file.getvalue()
    assert "finished  by an earlier run of 2 steps; nothing is trained or written" in said
    assert said.count("changed   ") == 1
    assert "changed   --max-steps 1 instead of 2\n" in said
    more = train_drafter(replace(told, resume=True, max_steps=5, learning_rate=0.5), console=console)
    assert "changed   --max-steps 5 instead of 2, --learning-rate 0.5 instead of 0.002\n" in console.file.getvalue()
    assert more.record["stages"][0]["steps"] == 5
    assert len((told.out / "data" / "conversations.jsonl").read_text().splitlines()) == 8, "no answer is written again"
    assert (told.out / "model.safetensors").read_bytes() != weights
    assert "steps     5, 2 of them done\nmeasured  5 x 2 prompts\n" in console.file.getvalue()
    recorded = json.loads((told.out / "training_report.json").read_text())
    assert recorded["recipe"]["max_steps"] == "5"
    (change,) = recorded["changed"]
    assert change == "from step 3 on --max-steps 5 instead of 2, --learning-rate 0.5 instead of 0.002"
    assert f"resumed with other options: {change}." in fill_card(told.out, "owner/drafter")
    second = train_drafter(replace(told, stage="2", drafter=str(told.out), out=tmp_path / "second", max_steps=1))
    (stage,) = second.record["stages"]
    assert (stage["name"], stage["steps"]) == ("stage2", 1)
    assert [point["step"] for point in stage["curve"]] == [0, 1], "beside what it began with"
    per_step = second.record["plan"]["tokens"] / second.record["plan"]["rows"] * 2
    assert [point["tokens"] for point in stage["curve"]] == [0, round(per_step)]
    anew = train_drafter(replace(told, fresh=True))
    assert anew.record["stages"] == report.record["stages"]
    assert (told.out / "model.safetensors").read_bytes() == weights


def test_help_names_options_as_they_are_typed() -> None:
    words = [each.metadata["option"]["help"] for each in fields(TrainingSettings) if "option" in each.metadata]
    assert not [text for text in words if re.search("[a-z]_[a-z]", text)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"resume": True}, "nothing to resume"),
        ({"resume": True, "fresh": True}, "--resume and --fresh exclude each other"),
        ({"stage": "3"}, "--stage is '3'; wanted one of 1, 2"),
        ({"stage": "both"}, r"--stage both was removed in 0\.2\.0: train stage 1, then"),
        ({"stage": "2"}, "stage 2 improves a trained drafter"),
        ({"prompts": ()}, "no --prompts given"),
        ({"ttt_steps": 0}, "--ttt-steps is 0; wanted more than 0"),
        ({"learning_rate": -1.0}, "--learning-rate is -1.0; wanted more than 0"),
        ({"temperature": (-1.0,)}, "wanted 0"),
        ({"regenerate": "some"}, "--regenerate is 'some'"),
        ({"dtype": "fp64"}, "--dtype is 'fp64'"),
        ({"out": Path(__file__)}, r"test_training_runs\.py' is a file; name a folder"),
        ({"out": Path(__file__) / "run"}, r"test_training_runs\.py' is a file; name a folder"),
    ],
)
def test_a_run_that_makes_no_sense(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    told = training("x.jsonl", tmp_path / "none")
    with pytest.raises(Eagle31Error, match=message):
        train_drafter(replace(told, **changed))


def test_a_drafter_that_cannot_be_trained_is_refused_before_the_target_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.Run, "read_texts", lambda self: pytest.fail("the target writes for hours"))
    told = training("self:9", tmp_path / "out", dtype="float32")
    make_drafter(make_target()).save_pretrained(tmp_path / "of another width")
    with pytest.raises(Eagle31Error, match="hidden"):
        train_drafter(replace(told, drafter=str(tmp_path / "of another width")))
    with pytest.raises(Eagle31Error, match="draft_vocab_size"):
        train_drafter(replace(told, draft_vocab_size=99_999))


def test_texts_to_measure_on_are_greedy_ones_and_those_that_are_served(
    tmp_path: Path, target, tokenizer, drafter, monkeypatch
) -> None:
    log = io.StringIO()
    run = run_of(training("x.jsonl", tmp_path), target, tokenizer, log)
    prompts = [EvaluationPrompt([1, 5, 9], "a"), EvaluationPrompt([1, 7, 8, 4], "b")]
    assert list(run._known_texts(drafter, prompts)) == [0.0, 1.0]
    run.settings = replace(run.settings, temperature=(0.7,))
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.3)
    assert list(run._known_texts(drafter, prompts)) == [0.0, 0.7]
    assert "without what looks at the text (of RepetitionPenaltyLogitsProcessor" in log.getvalue()


def joint_run(rows: str, out: str, batch_rows: int) -> None:
    train_drafter(training(
        rows, Path(out), batch_rows=batch_rows, max_new_tokens=6, max_length=32, epochs=1.0, eval_steps=9,
        temperature=(0.0,),  # what is drawn depends on which rows are written together
        dtype="float32",
    ))  # fmt: skip
    threads = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    # They would abort the process as it ends, now and then.
    assert not any("gloo" in name for name in threads), threads


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_write_and_train_as_one(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    joint_run(str(rows), str(tmp_path / "1"), batch_rows=2)
    for process in start_group(2, joint_run, str(rows), str(tmp_path / "2"), 1, log=tmp_path / "log"):
        assert finish(process) == 0, [log.read_text()[-3000:] for log in tmp_path.glob("log.*")]
    one, two = (json.loads((tmp_path / name / "training_report.json").read_text()) for name in ("1", "2"))
    for name in ("rows", "tokens", "supervised_tokens", "coverage"):
        assert one["plan"][name] == two["plan"][name], name
    assert one["plan"]["steps"] == two["plan"]["steps"]
    texts = [
        {kind: counts["rounds"] + counts["accepted"] for kind, counts in each["stages"][0]["acceptance"].items()}
        for each in (one, two)
    ]
    assert texts[0] == texts[1], "tokens that acceptance is measured on, by kind, those of both processes"
    vocabularies = [load_file(tmp_path / name / "model.safetensors")["d2t"] for name in ("1", "2")]
    assert torch.equal(*vocabularies)
    assert two["stages"][0]["loss"] == pytest.approx(one["stages"][0]["loss"], rel=1e-3)
    assert (tmp_path / "2" / "data" / "conversations-1.jsonl").exists()


STEPS = 6


def words_for(out: Path, *options: str) -> list[str]:
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


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits another process by prlimit")
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
