"""What a run will take, told before its first step, and what it made, as `training_report.json` keeps it.

The card is filled from that record. It holds no path of this machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from .. import __version__
from ..checkpoints.card import RECORD_FILE
from ..drafter.drafter import Eagle31Drafter
from ..errors import count
from ..memory.plan import size_text
from ..stats import USELESS_LENGTH
from ..targets.devices import now
from .measure import KnownTexts, rounds_of
from .objectives import DistillationModel
from .settings import TrainingSettings, flag
from .trainer import DRAFT_TOKENS

_NO_PART_OF_A_RECIPE = ("out", "resume", "fresh", "device", "report_to", "license", "target_id")


@dataclass(frozen=True)
class TrainingPlan:
    """Figures of a run."""

    rows: int  # rows, tokens, supervised_tokens: packed rows and what they hold
    tokens: int
    supervised_tokens: int
    coverage: float  # share of the supervised tokens that can be drafted
    tokens_per_step: float  # tokens in an optimiser step, on all processes together, without padding
    steps: int  # optimiser steps
    done: int  # of these, by the run that is gone on with
    step_s: float  # seconds of one, measured
    measurements: int  # of acceptance
    measurement_s: float  # seconds of one, from one text of it
    prompts: int  # that acceptance is measured on
    disk_bytes: int  # checkpoints at their most

    def __str__(self) -> str:
        prompts = count(self.prompts, "prompt")
        total_s = (self.steps - self.done) * self.step_s + self.measurements * self.measurement_s
        return "\n".join(
            (
                f"data      {count(self.tokens, 'token')} in {count(self.rows, 'row')}",
                f"learned   {count(self.supervised_tokens, 'token')}, {self.coverage:.2%} of them can be drafted",
                f"steps     {self.steps:,} at {self.step_s:.2f} s" + f", {self.done:,} of them done" * (self.done > 0),
                f"measured  {self.measurements} x {prompts}, about {self.measurement_s:.2g} s each",
                f"time      {total_s / 60:.1f} minutes",
                f"disk      {size_text(self.disk_bytes)}",
            )
        )


def time_step(model: DistillationModel, rows: list[dict[str, Tensor]], *, bf16: bool) -> float:
    """Seconds of forward and backward over one batch of these rows; the model is left as it was."""
    device = model.drafter.device
    batch = {name: tensor.to(device) for name, tensor in default_collate(rows).items()}

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    with torch.random.fork_rng():
        return _seconds_of(step, device)


def time_measurement(drafter: Eagle31Drafter, known: Sequence[KnownTexts]) -> float:
    """Seconds that acceptance on known texts will take: of the first text of each temperature, times the others."""
    seconds = 0.0
    for texts in known:
        measure = partial(rounds_of, drafter, dataclasses.replace(texts, texts=texts.texts[:1]), DRAFT_TOKENS)
        seconds += len(texts.texts) * _seconds_of(measure, drafter.device)
    return seconds


def _seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """What `work` takes when it is done again: the first time pays for memory and kernels."""
    work()
    started = now(device)
    work()
    return now(device) - started


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingReport:
    """What a run made.

    Attributes:
        folder: of the drafter.
        record: what `training_report.json` there holds. Its one entry of `stages` has `name`, optimiser `steps` done,
            the last training `loss`, `acceptance` by kind of prompt (fields of `stats.Acceptance` and their
            `acceptance_length`), and a `curve` of `step`, `tokens` seen and `acceptance_length` while it learned.
    """

    folder: Path
    record: dict[str, Any]

    def advice(self, target: str, target_id: str | None) -> Iterator[str]:
        """What to do with the drafter, one line each; `target_id` as in the settings."""
        kinds = self.record["stages"][0]["acceptance"].values()
        length = 1 + sum(counts["accepted"] for counts in kinds) / sum(counts["rounds"] for counts in kinds)
        if length < USELESS_LENGTH:
            yield (
                f"it brings {length:.2f} tokens a pass on held-out prompts, too few to be of use: train on more texts "
                "(--prompts), for longer (--epochs, --max-steps)"
            )
        else:
            yield f"try it: eagle31 chat {target} {self.folder}"
            if Path(target).is_dir() and target_id is None:
                yield "its card names a folder as its target; to publish it, train with --target-id OWNER/NAME"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"folder": str(self.folder), **self.record}


def read_report(folder: Path) -> TrainingReport | None:
    """What the record in a drafter's folder says; `None` where no run of this version has ended there."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        return TrainingReport(folder, record) if record["plan"]["steps"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the record -------------------------------------------------------------------------------------------------------


Recipes = list[list[Any]]
"""What the steps of a run are done with: from behind which step on, and the options that decide what is learned."""


def recipe_of(settings: TrainingSettings) -> dict[str, str]:
    """The options that decide what is learned, with the names others know texts by."""
    recipe = {}
    for name, value in vars(settings).items():
        if name not in _NO_PART_OF_A_RECIPE and value not in (None, ()):
            items = value if isinstance(value, tuple) else (value,)
            recipe[name] = ", ".join(published_name(str(item)) for item in items)
    return recipe


def differences(before: dict[str, str], now: dict[str, str]) -> str:
    """`"--learning-rate 0.01 instead of 0.001, --max-rows 9 instead of none"`."""
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return ", ".join(f"{flag(name)} {now.get(name, 'none')} instead of {before.get(name, 'none')}" for name in names)


def make_record(
    plan: TrainingPlan, stage: dict[str, Any], settings: TrainingSettings, recipes: Recipes
) -> dict[str, Any]:
    """Facts and figures of a run with resolved settings."""
    changed = [
        f"from step {step + 1:,} on {differences(before, now)}" for (_, before), (step, now) in pairwise(recipes)
    ]
    return {
        "target": settings.target_id or published_name(settings.target),
        "license": settings.license,
        "data": [published_name(source) for source in settings.prompts],
        "recipe": recipes[-1][1],
        "changed": changed,
        "conditions": (
            f"{count(plan.prompts, 'held-out prompt')}, greedy, chain of {DRAFT_TOKENS} draft tokens along the "
            f"target's own texts of at most {count(settings.eval_new_tokens, 'token')}; prefill not counted."
        ),
        "versions": {"eagle31-hf": __version__} | {name: version(name) for name in ("torch", "transformers")},
        "plan": asdict(plan),
        "stages": [stage],
    }


def published_name(name: str) -> str:
    """A Hub id, or of a local file or folder its last part."""
    return Path(name).resolve().name if Path(name).expanduser().exists() else name
