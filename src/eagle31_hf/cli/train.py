"""`eagle31 train`: one command from a target and prompts to a published drafter."""

from __future__ import annotations

from ..training.settings import TrainingSettings
from .options import command, make_console
from .progress import waiting_for


@command
def train(*, settings: TrainingSettings) -> None:
    """Make a drafter for a target: the target writes, the drafter learns and is measured. Prints its plan first."""
    # Here and not above: Trainer takes longer to import than every other command takes to start.
    with waiting_for("loading the trainer"):
        from ..training.progress import is_first_process
        from ..training.train import train_drafter

    report = train_drafter(settings, console=make_console(stderr=True))
    if is_first_process():
        console = make_console()
        console.print(f"the drafter is in {report.folder}")
        for line in report.advice(settings.target, settings.target_id):
            console.print(line)
