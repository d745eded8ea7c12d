"""How many optimiser steps a run has that shall end at a given time."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from accelerate.utils import broadcast_object_list

from ..errors import TrainingError

STEPS_FILE = "steps.json"
MOST_STEPS = 2**40


def steps_in_time(folder: Path, seconds_of: Callable[[int], float], left_s: float, *, resume: bool) -> int:
    """The most steps that are done and measured in time, on all processes as many.

    A run that is resumed keeps the number it began with, since its learning rate decays over so many.

    Args:
        folder: of the run; the number is kept there.
        seconds_of: what so many steps and their measurements take; more never take less.
        left_s: seconds there are.

    Raises:
        TrainingError: not even one step is done in time.
    """
    kept = folder / STEPS_FILE
    if resume and kept.exists():
        return int(json.loads(kept.read_text(encoding="utf-8"))["steps"])
    steps = int(broadcast_object_list([most_steps(seconds_of, left_s)])[0])
    if not steps:
        raise TrainingError(
            f"{left_s / 60:.1f} of the minutes are left after texts were written and read, and one step and its "
            f"measurement take {seconds_of(1) / 60:.1f}; give more minutes, or less to write and to measure "
            "(max_rows, held_out, eval_new_tokens)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"steps": steps}), encoding="utf-8")
    return steps


def most_steps(seconds_of: Callable[[int], float], left_s: float) -> int:
    """The most steps that take no longer than that; 0: not even one does not."""
    return bisect_right(range(1, MOST_STEPS), left_s, key=seconds_of)
