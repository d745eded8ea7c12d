"""What is told of long work where no bar can be drawn."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from eagle31_hf.errors import TrainingError
from eagle31_hf.training import train
from eagle31_hf.training.progress import Counting, LiveProgress


@pytest.mark.parametrize(("resumes", "first", "says"), [(False, 4, False), (True, 4, True), (True, 0, False)])
def test_only_what_an_earlier_run_has_left_is_said_to_be_kept(resumes, first, says):
    log = io.StringIO()
    with Counting(Console(file=log), "the target writes", 10, resumes=resumes) as counting:
        for count in (first, 3, 3):
            counting.advance(count)
    assert ("kept from an earlier run" in log.getvalue()) == says
    assert f"{first + 6} of 10 in" in log.getvalue()


def test_the_bar_moves_while_no_text_has_ended() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with Counting(console, "the target writes prompts", 8) as counting:
        counting.advance(1)
        counting.advance(0, 2.5)
        counting.bar.refresh()
        assert counting.bar.tasks[0].completed == 3.5
        assert "1 of 8" in written.getvalue()


def test_the_bar_says_that_acceptance_is_measured() -> None:
    counting = Counting(Console(file=io.StringIO()), "training", 8)
    bar, state, control = LiveProgress(Console(file=io.StringIO()), counting), TrainerState(), TrainerControl()
    control.should_evaluate = True
    bar.on_step_end(None, state, control)
    bar.on_log(None, state, control, {"loss": 2.0, "accuracy_step_0": 0.5, "accuracy_step_1": 0.4})
    assert counting.figures == ", loss 2.00, accuracy 0.50 to 0.40, measuring acceptance"
    bar.on_log(None, state, control, {"eval_acceptance_length": 1.5})
    assert counting.figures == ", loss 2.00, accuracy 0.50 to 0.40"


def test_the_bar_ends_where_training_ends_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, console = mock.Mock(), Console(file=io.StringIO(), force_terminal=True)
    trainer.return_value.train.side_effect = TrainingError("the loss is nan")
    monkeypatch.setattr(train, "DistillationTrainer", trainer)
    run: Any = mock.Mock(console=console, stage="stage1", checkpoint=None)
    with pytest.raises(TrainingError, match="the loss is nan"):
        train._Run._train(run, None, None, [], 4)
    assert not trainer.call_args.kwargs["callbacks"][0]._counting.bar.live.is_started
