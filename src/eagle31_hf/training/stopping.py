"""A run that is stopped from outside keeps what it has learnt and says how to go on; a resumed one says what it found.

While steps are done, SIGTERM and Ctrl-C end the run behind the step with a checkpoint; at other times, or sent twice,
at once.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from .progress import say
from .trainer import last_checkpoint
from .writing import settings_beside

STAGE_FOLDERS = ("stage1", "stage2")
RESULT_FILE = "result.json"
"""In a stage's folder once it is finished."""


def describe_kept(out: Path) -> str:
    """What lies in a run's folder that `--resume` goes on with; empty if nothing does."""
    lines = {
        "self-written prompts": _lines(_written(out, "prompts*.jsonl")),
        "answers": _lines(_written(out, "conversations*.jsonl")),
    }
    parts = [f"{count:,} {what}" for what, count in lines.items() if count]
    for stage in STAGE_FOLDERS:
        checkpoint = last_checkpoint(out / stage)
        if (out / stage / RESULT_FILE).exists():
            parts.append(f"{stage} as a whole")
        elif checkpoint is not None:
            parts.append(f"{stage} up to step {int(checkpoint.name.rpartition('-')[2]):,}")
    return ", ".join(parts)


def _written(out: Path, names: str) -> list[Path]:
    """Texts that a run has written, which their settings stand beside: no files of anybody else's."""
    return [path for path in sorted((out / "data").glob(names)) if settings_beside(path).exists()]


def _lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def remove_run(out: Path) -> None:
    """Remove texts and checkpoints that an earlier run has left in its folder, and nothing else."""
    for path in (*_written(out, "prompts*.jsonl"), *_written(out, "conversations*.jsonl")):
        path.unlink()
        settings_beside(path).unlink()
    for stage in STAGE_FOLDERS:
        shutil.rmtree(out / stage, ignore_errors=True)


class StopRequest(TrainerCallback):
    """SIGTERM or Ctrl-C, which a trainer answers behind its step.

    Args:
        waits: whether steps are finished; of several processes each hears signals at another step, so none waits.
    """

    def __init__(self, console: Console, *, waits: bool = True):
        self._console, self._waits = console, waits
        self._steps = False  # whether steps are being done
        self.number: int | None = None  # of the signal that came while they were

    def hear(self, number: int, frame: Any = None) -> None:
        """Handler of the signals."""
        if not (self._steps and self._waits and self.number is None):
            self.number = number
            self.leave()
        self.number = number
        with suppress(RuntimeError):  # of a stream that was just being written to
            say(self._console, "stopping behind this step, with a checkpoint; once more stops at once")

    def leave(self) -> None:
        """End the program if a signal came."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.number is not None:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = False


@contextmanager
def telling_what_is_kept(out: Path, console: Console, stop: StopRequest) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C go to `stop`, and a run that they end says what it has kept.

    Raises:
        SystemExit: SIGTERM came; its code is 128 and the signal's number, as shells count.
    """
    listens = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if listens:
        for number in before:
            signal.signal(number, stop.hear)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        kept = describe_kept(out)
        advice = f"kept in {out}: {kept}; go on with the same options and --resume" if kept else "nothing was kept yet"
        say(console, f"stopped; {advice}")
        raise
    finally:
        if listens:
            for number, handler in before.items():
                signal.signal(number, handler)
