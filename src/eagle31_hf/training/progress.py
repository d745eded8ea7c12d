"""What a person sees while a drafter is trained: loss, teacher-forced accuracy per step, acceptance, time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


def progress_bar(console: Console) -> Progress:
    """A bar with what is done, how much of it, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )


LINE_EVERY_S = 60.0
"""Where no bar can be drawn, the log file gets a line so often."""


class LiveProgress(TrainerCallback):
    """A bar with the latest loss and accuracies; a line for each measurement of served acceptance.

    Where the console is no terminal, the bar is a line a minute.
    """

    def __init__(self, console: Console, title: str):
        self._console, self._title = console, title
        self._bar = progress_bar(console)
        self._task: Any = None
        self._next_line_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._task = self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step, note="")
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._task is None or not logs:
            return
        if "loss" in logs:
            accuracy = " ".join(f"{v:.2f}" for name, v in logs.items() if name.startswith("accuracy_step_"))
            note = f"loss {logs['loss']:.3f}, accuracy by step {accuracy}"
            self._bar.update(self._task, note=note)
            self._print_now_and_then(state, note)
        if "eval_acceptance_length" in logs:
            positions = " ".join(f"{v:.2f}" for name, v in logs.items() if name.startswith("eval_acceptance_at_"))
            self._console.print(
                f"{self._title}, step {state.global_step:,}: acceptance length "
                f"{logs['eval_acceptance_length']:.3f}, by position {positions}",
                highlight=False,
                markup=False,
            )

    def _print_now_and_then(self, state: Any, note: str) -> None:
        if self._console.is_terminal or time.monotonic() < self._next_line_at:
            return
        self._next_line_at = time.monotonic() + LINE_EVERY_S
        left = self._bar.tasks[0].time_remaining
        told = "" if left is None else f", {left / 60:.0f} minutes left"
        self._console.print(
            f"{self._title}, step {state.global_step:,} of {state.max_steps:,}: {note}{told}",
            highlight=False,
            markup=False,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.stop()
