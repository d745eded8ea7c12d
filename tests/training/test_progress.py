"""What a run says while it works, when it is stopped, of what an earlier one has left, and when it has ended."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tiny_training import run_of, training
from transformers import TrainerState

from eagle31_hf.errors import TrainingError
from eagle31_hf.training.progress import Counting, LiveProgress, StopRequest, describe_kept, open_folder
from eagle31_hf.training.report import TrainingReport
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.writing import KeptLines


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name, number in (("prompts", 2), ("conversations", 1), ("conversations-1", 1)):
        KeptLines(tmp_path / "data" / f"{name}.jsonl").add(*[{}] * number)
    checkpoint = tmp_path / "stage1" / "checkpoint-1500"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1500}')
    for name in ("model.safetensors", "config.json"):
        (checkpoint / name).touch()
    return tmp_path


def test_what_is_kept_is_counted(out: Path, tmp_path: Path) -> None:
    assert describe_kept(out) == "2 self-written prompts, 2 answers, stage1 up to step 1,500"
    (out / "training_report.json").write_text(json.dumps({"plan": {"steps": 30}}))
    assert describe_kept(out).endswith("stage1 up to step 1,500, a drafter of 30 steps")
    assert describe_kept(tmp_path / "none") == ""


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(out: Path, target, tokenizer) -> None:
    """Which does not say what its steps were done with."""
    run = run_of(training("x.jsonl", out, resume=True), target, tokenizer)
    assert run.checkpoint == out / "stage1" / "checkpoint-1500"
    assert run.recipe["changed"] == []


def test_a_drafter_of_no_use_is_called_so(tmp_path: Path) -> None:
    for accepted, words in ((1, "1.10 tokens a pass on held-out prompts, too few"), (15, "eagle31 chat t ")):
        counts = {"rounds": 10, "accepted": accepted}
        report = TrainingReport(tmp_path, {"stages": [{"acceptance": {"all": counts}}]})
        (line,) = report.advice("t", None)
        assert words in line
    assert "--target-id" in list(report.advice(str(tmp_path), None))[-1], "a folder is nobody else's name"
    assert len(list(report.advice(str(tmp_path), "owner/target"))) == 1


def test_fresh_removes_what_a_run_has_left_and_nothing_else(out: Path) -> None:
    others = (
        "data/mine.jsonl",
        "data/conversations-of-others.jsonl",
        "data/measured.jsonl",
        "stages.txt",
        "rows.jsonl",
    )
    for name in others:
        (out / name).write_text("{}\n")
    (out / "stage-photos").mkdir()
    fresh = TrainingSettings("t", ("rows.jsonl",), out, fresh=True)
    open_folder(fresh, Console(quiet=True))
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    assert left == sorted((*others, "data", "stage-photos"))
    assert describe_kept(out) == ""


@pytest.mark.parametrize("content", ['{"prompt": "x"}\n', '{"prompt": "x"}', "no JSON\n"])
def test_a_file_that_no_run_has_written_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(TrainingError, match=r"prompts\.jsonl holds a line .* no run has written .*; move the file"):
        KeptLines(file)
    assert file.read_text() == content
    with pytest.raises(TrainingError, match=r"c\.jsonl cannot be written .*; make room, and go on with --resume"):
        KeptLines(file / "c.jsonl").add({})


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stopped_run_tells_what_it_has_kept(out: Path, number: int, raised: type[BaseException], keeps: bool) -> None:
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    before, folder = signal.getsignal(signal.SIGTERM), out if keeps else out / "none"
    console = Console(file=io.StringIO(), width=300)
    with pytest.raises(raised), StopRequest(console, folder):
        signal.raise_signal(number)
    signal.signal(signal.SIGINT, interrupted)
    kept = f"kept in {out}: 2 self-written prompts, 2 answers, stage1 up to step 1,500; go on with the same options and"
    assert console.file.getvalue() == (f"stopped; {kept} --resume\n" if keeps else "stopped; nothing was kept yet\n")
    assert signal.getsignal(signal.SIGTERM) is before


# --- while it works ---------------------------------------------------------------------------------------------------


def test_the_bar_moves_while_no_text_has_ended() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with Counting(console, "the target writes prompts", 8) as counting:
        counting.count(1)
        counting.count(0, 2.5)
        counting.refresh()
        assert counting.tasks[0].completed == 3.5
        assert "1 of 8" in written.getvalue()


def test_steps_are_counted_with_their_figures_and_a_measurement_has_a_line() -> None:
    log = io.StringIO()
    counting, state = Counting(Console(file=log, width=200), "training", 8), TrainerState(global_step=3)
    progress = LiveProgress(counting)
    progress.on_log(None, state, None, {"loss": 2.0, "accuracy": [0.5, 0.45, 0.4]})
    progress.on_step_end(None, state, None)
    assert counting.tasks[0].fields["note"] == "1 of 8, loss 2.00, 1st draft right 50%, last 40%"
    measured = {"eval_acceptance_length": 1.5, "eval_acceptance_at": [0.4, 0.1]}
    progress.on_log(None, state, None, measured | {"eval_served_lengths": {0.0: 1.5, 0.6: 1.25}})
    line = "step 3: acceptance length 1.500, by position 0.40 0.10; by temperature 1.500 at 0, 1.250 at 0.6\n"
    assert log.getvalue() == line


def test_the_bar_ends_where_the_work_ends_by_an_error() -> None:
    written = io.StringIO()
    counting = Counting(Console(file=written, force_terminal=True), "training", 8)
    counting.count(3)
    with pytest.raises(TrainingError), counting:
        raise TrainingError("the loss is nan")
    assert not counting.live.is_started
    assert "training: stopped at 3 of 8" in written.getvalue()
