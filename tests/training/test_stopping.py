"""A run that is stopped says what it has kept; one that has ended says what it was told and how it learned."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

from eagle31_hf.errors import TrainingError
from eagle31_hf.training.progress import StopRequest, describe_kept, open_folder
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
