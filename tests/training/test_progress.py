"""What is told of long work where no bar can be drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import TrainerState

from eagle31_hf.errors import TrainingError
from eagle31_hf.training.progress import Counting, LiveProgress


def test_a_log_gets_a_line_at_the_end() -> None:
    log = io.StringIO()
    with Counting(Console(file=log), "the target writes", 10) as counting:
        for count in (4, 3, 3):
            counting.count(count)
    (line,) = log.getvalue().splitlines()
    assert line.startswith("the target writes: 10 of 10 in")


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
    assert counting.tasks[0].fields["note"] == "1 of 8, loss 2.00, accuracy 0.50 to 0.40"
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
