"""The record of a run in `training_report.json`, from which its card is filled. It holds no path of this machine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from .settings import TrainingSettings
from .trainer import DRAFT_TOKENS, last_checkpoint

PACKAGES = ("torch", "transformers")
_OF_THIS_MACHINE = ("resume", "fresh", "device", "push", "report_to")
_IN_OTHER_FIELDS = ("target", "target_id", "prompts", "out", "drafter", "held_out", "license")


def make_record(settings: TrainingSettings, given: TrainingSettings, *, prompts: int) -> dict[str, Any]:
    """The record's facts and figures.

    Args:
        given: the settings the run was given, before those left open were filled.
        prompts: how many acceptance was measured on.
    """
    return {
        "target": target_name(settings),
        "license": settings.license,
        "data": [published_name(source) for source in settings.prompts],
        "command": command_line(settings, given),
        "recipe": _recipe(settings),
        "conditions": (
            f"{prompts} held-out prompts, greedy, chain of {DRAFT_TOKENS} draft tokens along the target's own texts of "
            f"at most {settings.eval_new_tokens} tokens; prefill not counted."
        ),
        "versions": {"eagle31-hf": __version__, **{name: version(name) for name in PACKAGES}},
    }


def target_name(settings: TrainingSettings) -> str:
    """What others call the target: its Hub id, or of a local folder or file its last part."""
    return settings.target_id or published_name(settings.target)


def published_name(name: str) -> str:
    """A Hub id, or of a local file or folder its last part."""
    return Path(name).resolve().name if Path(name).expanduser().exists() else name


def command_line(settings: TrainingSettings, given: TrainingSettings) -> str:
    """The command that makes the drafter, with the names others know target and texts by."""
    words = ["eagle31", "train", target_name(settings)]
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name in ("target", "target_id", "out", *_OF_THIS_MACHINE) or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if value is True:
            words.append(flag)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag, published_name(item) if isinstance(item, str) else str(item)]
    return shlex.join([*words, "--out", "drafter"])


def learning_curve(folder: Path, tokens_per_step: float) -> list[dict[str, float]]:
    """Measured acceptance by step and tokens seen, as a stage's last checkpoint has it."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return []
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return [
        {
            "step": entry["step"],
            "tokens": round(entry["step"] * tokens_per_step),
            "acceptance_length": entry["eval_acceptance_length"],
            "standard_error": entry["eval_acceptance_error"],
        }
        for entry in state["log_history"]
        if "eval_acceptance_length" in entry
    ]


def _recipe(settings: TrainingSettings) -> dict[str, str]:
    hidden = {*_OF_THIS_MACHINE, *_IN_OTHER_FIELDS}
    return {
        field.name: str(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if field.name not in hidden and getattr(settings, field.name) is not None
    }
