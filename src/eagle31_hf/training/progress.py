"""What a person sees while a drafter is trained, how a run is stopped from outside, and what it has then kept."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback

from ..checkpoints.card import RECORD_FILE
from ..errors import TrainingError, count
from .report import read_report
from .settings import STAGES, TrainingSettings
from .trainer import last_checkpoint, step_of
from .writing import MARK

TEXTS = {"prompts": "self-written prompt", "conversations": "answer"}
"""What a run keeps line by line in its folder (`writing.data_file`)."""
LINE_EVERY_S = 30.0
"""Where no bar can be drawn, the log gets a line so often."""


def say(console: Console, text: str) -> None:
    """Print a line as it is, not searched for markup. A terminal gets it wrapped at words, a log as one line."""
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


class Counting(Progress):
    """Shows how far some long work is: by a bar on a terminal; elsewhere by a line now and then and at its end.

    Args:
        title: what is done, as in "the target writes answers".
        total: how much there is to do, what an earlier run has done included.
    """

    def __init__(self, console: Console, title: str, total: int):
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(table_column=Column(min_width=6, max_width=24)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            speed_estimate_period=600,  # some things are done by the batch, and a batch takes minutes
            transient=True,
            disable=not console.is_terminal,
        )
        self.add_task(title, total=total, note=f"0 of {total:,}")
        self._task, self._said_at = self.tasks[0], time.monotonic()
        self._ended, self.figures = 0, ""

    def count(self, ended: int, underway: float = 0.0) -> None:
        """So many more have ended; `underway` is how much of the others is done, so that the bar moves meanwhile."""
        self._ended += ended
        self.update(self._task.id, completed=max(self._ended + underway, self._task.completed), note=self._so_far())
        if time.monotonic() - self._said_at >= LINE_EVERY_S:
            seconds = self._task.time_remaining
            self._say(self._so_far() + ("" if seconds is None else f", {seconds / 60:.0f} minutes left"))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            say(self.console, f"{self._task.description}: stopped at {self._so_far()}")
        else:
            self._say(f"{self._so_far()} in {(self._task.elapsed or 0.0) / 60:.1f} minutes")

    def _so_far(self) -> str:
        return f"{self._ended:,} of {self._task.total:,}{self.figures}"

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        if not self.console.is_terminal:
            say(self.console, f"{self._task.description}: {text}")


class LiveProgress(TrainerCallback):
    """Counts steps, with the latest loss and accuracies; a line for each measurement of acceptance."""

    def __init__(self, counting: Counting):
        self._counting = counting

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting.count(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting.count(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            steps = logs["accuracy"]
            right = f"1st draft right {steps[0]:.0%}, last {steps[-1]:.0%}"
            self._counting.figures = f", loss {logs['loss']:.2f}, {right}"
        if "eval_acceptance_length" in logs:
            positions = " ".join(f"{share:.2f}" for share in logs["eval_acceptance_at"])
            line = f"acceptance length {logs['eval_acceptance_length']:.3f}, by position {positions}"
            if len(served := logs["eval_served_lengths"]) > 1:
                lengths = ", ".join(f"{length:.3f} at {temperature:g}" for temperature, length in served.items())
                line += f"; by temperature {lengths}"
            say(self._counting.console, f"step {state.global_step:,}: {line}")


def is_first_process() -> bool:
    """The one that writes and speaks; `accelerate launch` numbers them here before anything is loaded."""
    return os.environ.get("RANK", "0") == "0"


# --- what a run has kept ----------------------------------------------------------------------------------------------


def open_folder(settings: TrainingSettings, console: Console) -> None:
    """Say what a resumed run finds in its folder, remove what a fresh one is to forget."""
    out, kept = settings.out, describe_kept(settings.out)
    if settings.resume and not out.is_dir():
        raise TrainingError(f"nothing to resume: there is no folder {out}; start without --resume")
    if settings.resume:
        say(console, f"resuming  {kept or 'an empty folder'}")
    elif kept and not settings.fresh:
        raise TrainingError(
            f"{out} holds an earlier run ({kept}); go on with --resume, begin anew with --fresh, or name another folder"
        )
    elif settings.fresh and is_first_process():
        remove_run(out)


def describe_kept(out: Path) -> str:
    """What lies in a run's folder that `--resume` goes on with; empty if nothing does."""
    lines = {what: sum(path.read_bytes().count(b"\n") for path in _written(out, name)) for name, what in TEXTS.items()}
    parts = [count(number, what) for what, number in lines.items() if number]
    for stage in (f"stage{number}" for number in STAGES):
        if checkpoint := last_checkpoint(out / stage):
            parts.append(f"{stage} up to step {step_of(checkpoint):,}")
    if report := read_report(out):
        parts.append(f"a drafter of {count(report.record['plan']['steps'], 'step')}")
    return ", ".join(parts)


def remove_run(out: Path) -> None:
    """Remove texts and checkpoints that an earlier run has left in its folder, and nothing else."""
    for path in (path for name in TEXTS for path in _written(out, name)):
        path.unlink()
    for number in STAGES:
        shutil.rmtree(out / f"stage{number}", ignore_errors=True)
    if read_report(out):
        (out / RECORD_FILE).unlink()


def _written(out: Path, name: str) -> list[Path]:
    """Texts that a run has written: no files of anybody else's."""
    files = [*(out / "data").glob(f"{name}.jsonl"), *(out / "data").glob(f"{name}-[0-9]*.jsonl")]
    return [path for path in files if path.read_bytes().startswith(MARK)]


# --- stopping ---------------------------------------------------------------------------------------------------------


class StopRequest(TrainerCallback):
    """SIGTERM or Ctrl-C: while steps are done the run ends behind the step, with a checkpoint, else at once.

    A second signal ends it at once, too. Of several processes each may hear it within another step, or one alone: all
    end behind the same, and no signal ends one before. Signals are heard within its context, and a run that they end
    says what it has kept.

    Args:
        out: the run's folder.
    """

    def __init__(self, console: Console, out: Path):
        self._console, self._out = console, out
        self._steps = False  # whether steps are being done
        self._handlers: dict[int, Any] = {}  # of before
        self.number = 0  # of the signal that came

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self.hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind in (KeyboardInterrupt, SystemExit):
            kept = describe_kept(self._out)
            going_on = f"kept in {self._out}: {kept}; go on with the same options and --resume"
            say(self._console, f"stopped; {going_on if kept else 'nothing was kept yet'}")
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def hear(self, number: int, frame: Any = None) -> None:
        """Handler of the signals."""
        again, self.number = self.number, number
        if not self._steps or (again and PartialState().num_processes == 1):
            self._leave()
        with suppress(RuntimeError):  # of a stream that was just being written to
            say(self._console, "stopping after this step, with a checkpoint; press again to stop at once")

    def _leave(self) -> None:
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number:
            raise SystemExit(128 + self.number)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.number = max(gather_object([self.number]))
        if self.number:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = False
        self._leave()
