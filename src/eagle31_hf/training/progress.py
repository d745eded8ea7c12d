"""What a person sees while a drafter is trained: loss, teacher-forced accuracy per step, acceptance, time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

LINE_EVERY_S = 30.0
"""Where no bar can be drawn, the log gets a line so often."""


def say(console: Console, text: str) -> None:
    """Print a line as it is: neither wrapped, which tears it in a log, nor searched for markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def progress_bar(console: Console) -> Progress:
    """A bar with what is done, how much of it, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        speed_estimate_period=600,  # some things are done by the batch, and a batch takes minutes
        transient=True,
        disable=not console.is_terminal,
    )


def _left(bar: Progress) -> str:
    seconds = bar.tasks[0].time_remaining
    return "" if seconds is None else f", {seconds / 60:.0f} minutes left"


class Counting:
    """Shows how far some long work is: by a bar on a terminal; elsewhere by a line now and then and at its end.

    Args:
        title: what is done, as in "the target writes answers".
        total: how much there is to do.
        resumes: whether the first count is what an earlier run had done.
    """

    def __init__(self, console: Console, title: str, total: int, *, resumes: bool = False):
        self._console, self._title, self._total, self._resumes = console, title, total, resumes
        self._bar = progress_bar(console)
        self._task = self._bar.add_task(title, total=total, note=f"0 of {total:,}")
        self._started_at = self._said_at = time.monotonic()
        self._ended = 0

    def advance(self, ended: int, underway: float = 0.0) -> None:
        """So many more have ended; `underway` is how much of the others is done, so that the bar moves meanwhile."""
        self._ended += ended
        done = max(self._ended + underway, self._bar.tasks[0].completed)
        self._bar.update(self._task, completed=done, note=self._so_far())
        if self._resumes and ended:
            self._say(f"{self._so_far()}, kept from an earlier run")
        elif time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._say(self._so_far() + _left(self._bar))
        self._resumes = False

    def __enter__(self) -> Counting:
        self._bar.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._bar.stop()
        minutes = (time.monotonic() - self._started_at) / 60
        if kind is None:
            self._say(f"{self._so_far()} in {minutes:.1f} minutes")
        else:
            say(self._console, f"{self._title}: stopped at {self._so_far()}")

    def _so_far(self) -> str:
        return f"{self._ended:,} of {self._total:,}"

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        if not self._console.is_terminal:
            say(self._console, f"{self._title}: {text}")


class LiveProgress(TrainerCallback):
    """A bar with the latest loss and accuracies; a line for each measurement of served acceptance.

    Where the console is no terminal, a line now and then stands for the bar.
    """

    def __init__(self, console: Console, title: str):
        self._console, self._title = console, title
        self._bar = progress_bar(console)
        self._task: Any = None
        self._figures, self._next_line_at = "", 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._task = self._bar.add_task(self._title, total=state.max_steps, note="")
            self._bar.start()
            self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:
            note = f"{state.global_step:,} of {state.max_steps:,}{self._figures}"
            self._bar.update(self._task, completed=state.global_step, note=note)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._task is None or not logs:
            return
        if "loss" in logs:
            accuracy = " ".join(f"{v:.2f}" for name, v in logs.items() if name.startswith("accuracy_step_"))
            self._figures = f": loss {logs['loss']:.3f}, accuracy by step {accuracy}"
            self._print_now_and_then(f"step {state.global_step:,} of {state.max_steps:,}{self._figures}")
        if "eval_acceptance_length" in logs:
            positions = " ".join(f"{v:.2f}" for name, v in logs.items() if name.startswith("eval_acceptance_at_"))
            length = f"acceptance length {logs['eval_acceptance_length']:.3f}, by position {positions}"
            prefix = "eval_served_length_at_"
            served = [f"{v:.3f} at {n.removeprefix(prefix)}" for n, v in logs.items() if n.startswith(prefix)]
            length += f"; by temperature {', '.join(served)}" if len(served) > 1 else ""
            say(self._console, f"{self._title}, step {state.global_step:,}: {length}")

    def _print_now_and_then(self, line: str) -> None:
        if not self._console.is_terminal and time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_EVERY_S
            say(self._console, f"{self._title}, {line}{_left(self._bar)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End the bar, also where training ended by an error."""
        self._bar.stop()
