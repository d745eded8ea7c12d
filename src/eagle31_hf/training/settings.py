"""The settings of a training run. Every field's `help` is the text of its command-line option."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, removal
from ..targets.devices import PRECISIONS

STAGES = ("1", "2")

# Headings of `eagle31 train --help`.
COMMON = "Options that most runs need"
DATA = "What it learns from"
WRITING = "What the target writes"
DRAFTER = "The drafter"
STEPS = "Steps"
MEASURING = "Measuring acceptance"
MACHINE = "Machine"
RESULT = "Publishing"


def _option(default: Any, group: str, help: str, **more: Any) -> Any:
    """A field that `cli.options` makes a command-line option of; without a default it is required."""
    option = {"help": help, "rich_help_panel": group, "show_default": default not in (None, ())}
    return field(default=default, metadata={"flags": (), "option": option, **more})


def _sized(small: Any, large: Any, group: str, help: str) -> Any:
    """An option whose default depends on the target's size (`preparation.resolve`)."""
    words = f"{help}; default {small} for a small target, else {large}"
    return _option(None, group, words, by_size=(small, large))


def flag(name: str) -> str:
    """A field as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class TrainingSettings:
    """One training run. What is `None` by default is chosen to suit the target (`preparation.resolve`)."""

    target: str = field(metadata={"argument": {"help": "target: folder or Hub id", "show_default": False}})
    prompts: tuple[str, ...] = _option(
        MISSING,
        COMMON,
        "JSONL files, folders or Hub data sets with conversations; self or self:N: the target writes them",
    )
    out: Path = _option(MISSING, COMMON, "folder for the drafter, its checkpoints and its data")
    resume: bool = _option(False, COMMON, "go on with what a run has left in the folder")
    fresh: bool = _option(False, COMMON, "remove what a run has left in the folder, and begin anew")
    quantization: str | None = _option(
        None, COMMON, "load the target in 4bit or 8bit (bitsandbytes), as it will be served"
    )
    stage: str = _option(
        "1", STEPS, "1 (distillation) or 2 (expected acceptance, of a trained drafter; not shown to pay)"
    )
    drafter: str | None = _option(None, DRAFTER, "start from this drafter (folder or Hub id) instead of a fresh one")
    held_out: tuple[str, ...] = _option(
        (), MEASURING, "prompts to measure acceptance on, as --prompts names them; default: 64 rows kept from those"
    )
    max_rows: int | None = _option(None, DATA, "use at most so many conversations of each source")
    regenerate: str = _sized(
        "last", "each", WRITING, "assistant turns the target writes itself: each, last (one per row) or none"
    )
    temperature: tuple[float, ...] = _option(
        (),
        WRITING,
        "what it writes with; several share the rows; default: its generation config if that samples, else 0 and 1",
    )
    max_new_tokens: int = _sized(128, 256, WRITING, "most tokens it writes per turn")
    write_rows: int = _sized(64, 16, WRITING, "conversations it writes at a time")
    max_length: int = _sized(512, 4096, DATA, "tokens per packed row")
    draft_vocab_size: int = _option(
        None, DRAFTER, "tokens that can be drafted; default 32000, or half of a vocabulary that is no larger"
    )
    ttt_steps: int = _option(4, DRAFTER, "draft steps of the training-time test")
    max_steps: int | None = _option(None, COMMON, "optimiser steps; default: from the number of epochs")
    epochs: float = _option(2.0, STEPS, "passes over the data, if --max-steps is not given")
    # 3.99 accepted where 4 rows and 8e-3 gave 3.37 for the same tokens (docs/developing/decisions.md, 2026-11-22).
    batch_rows: int = _sized(2, 4, STEPS, "packed rows per forward and process")
    accumulate: int = _sized(1, 4, STEPS, "forwards per optimiser step")
    learning_rate: float = _sized(2e-3, 1e-4, STEPS, "of AdamW, a tenth of Muon's; in stage 2 a tenth of it is used")
    eval_steps: int = _sized(500, 200, MEASURING, "steps between measurements, each with a checkpoint")
    eval_new_tokens: int = _option(128, MEASURING, "most tokens written for a held-out prompt")
    dtype: str = _option(
        "auto", MACHINE, "precision of the target: as stored unless this CPU would emulate it, stored, bf16, fp16, fp32"
    )
    device: str = _option("auto", MACHINE, "auto, cpu, cuda or mps")
    seed: int = _option(0, STEPS, "of data order, sampling and initial weights")
    license: str | None = _option(None, RESULT, "licence of the drafter for its card, e.g. apache-2.0")
    target_id: str | None = _option(
        None, RESULT, "Hub id of a target given as folder or file, for the card and the lines that serve it"
    )

    def check(self) -> None:
        """Raise a `ConfigurationError` naming the first field that makes no sense."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                named = ", ".join(str(each) for each in allowed if each is not None)
                went = removal(f"--{name} {value}")
                raise ConfigurationError(went or f"{flag(name)} is {value!r}; wanted one of {named}")
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name != "seed" and not value > 0:
                raise ConfigurationError(f"{flag(name)} is {value}; wanted more than 0")
        file = next((str(path) for path in (self.out, *self.out.parents) if path.is_file()), None)
        problems = {
            f"--temperature is {min(self.temperature, default=0)}; wanted 0 (greedy) or more":
                min(self.temperature, default=0) < 0,
            "no --prompts given; name a JSONL file, a folder of them or a Hub data set": not self.prompts,
            f"--out is {str(self.out)!r}, and {file!r} is a file; name a folder": file is not None,
            "--resume and --fresh exclude each other; give one": self.resume and self.fresh,
            "--drafter is 'none'; to train a fresh drafter leave it out": self.drafter == "none",
            "stage 2 improves a trained drafter; name it with --drafter": self.stage == "2" and self.drafter is None,
        }  # fmt: skip
        for problem, holds in problems.items():
            if holds:
                raise ConfigurationError(problem)


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "stage": STAGES,
    "regenerate": (None, "each", "last", "none"),
    "quantization": (None, "4bit", "8bit"),
    "dtype": tuple(PRECISIONS),
    "device": ("auto", "cpu", "cuda", "mps"),
}
