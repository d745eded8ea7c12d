"""What a run made, as `training_report.json` keeps it.

The card is filled from that record. It holds no path of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoints.card import RECORD_FILE
from ..errors import count
from ..stats import USELESS_LENGTH
from .settings import TrainingSettings, flag
from .trainer import DRAFT_TOKENS

_NO_PART_OF_A_RECIPE = ("out", "resume", "fresh", "device", "license", "target_id")


@dataclass(frozen=True)
class TrainingReport:
    """What a run made.

    Attributes:
        folder: of the drafter.
        record: what `training_report.json` there holds. `plan` says how many `steps` were asked for, and how many
            `tokens` in how many packed `rows` there are. Its one entry of `stages` has `name`, optimiser `steps` done,
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


def read_report(folder: Path) -> TrainingReport | None:
    """What the record in a drafter's folder says; `None` where no run of this version has ended there."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        return TrainingReport(folder, record) if record["plan"]["steps"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the record -------------------------------------------------------------------------------------------------------


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
    plan: dict[str, Any], stage: dict[str, Any], settings: TrainingSettings, recipe: dict[str, Any]
) -> dict[str, Any]:
    """Facts and figures of a run with resolved settings, whose `recipe` and its changes stand in it as they are."""
    return {
        "target": settings.target_id or published_name(settings.target),
        "license": settings.license,
        "data": [published_name(source) for source in settings.prompts],
        **recipe,
        "conditions": (
            f"{count(plan['prompts'], 'held-out prompt')}, greedy, chain of {DRAFT_TOKENS} draft tokens along the "
            f"target's own texts of at most {count(settings.eval_new_tokens, 'token')}; prefill not counted."
        ),
        "versions": {"eagle31-hf": __version__} | {name: version(name) for name in ("torch", "transformers")},
        "plan": plan,
        "stages": [stage],
    }


def published_name(name: str) -> str:
    """A Hub id, or of a local file or folder its last part."""
    return Path(name).resolve().name if Path(name).expanduser().exists() else name
