"""A conversation of two turns to train on, a file of rows, and a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle31_hf.demo import target_path
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.progress import StopRequest
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import Run

CHAT = [
    {"role": "user", "content": "Two apples cost 4 dollars. What do five cost?"},
    {"role": "assistant", "content": "One costs 2 dollars."},
    {"role": "user", "content": "And five?"},
    {"role": "assistant", "content": "10 dollars."},
]


def chat(**fields) -> Conversation:
    return Conversation("row-7", "sums", tuple(CHAT), **fields)


def write_rows(folder: Path) -> Path:
    """A file of ten conversations of one turn."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    return rows


def training(rows: Path | str, out: Path, **fields: Any) -> TrainingSettings:
    """Settings by which the embedded target trains a small drafter on a CPU."""
    defaults = {"max_length": 48, "draft_vocab_size": 256, "batch_rows": 2, "device": "cpu"}
    return TrainingSettings(str(target_path()), (str(rows),), out, **(defaults | fields))


def writing(**fields: Any) -> TrainingSettings:
    """Settings by which the target writes a few tokens, greedily."""
    defaults = {"regenerate": "each", "temperature": (0.0,), "max_new_tokens": 6, "write_rows": 4, "max_length": 1024}
    return TrainingSettings("target", ("rows.jsonl",), Path("out"), **(defaults | fields))


def run_of(settings: TrainingSettings, target: Any, tokenizer: Any, log: io.StringIO | None = None) -> Run:
    """A run that says what it does to `log`."""
    console = Console(file=log or io.StringIO(), width=200)
    return Run(settings, target, tokenizer, console, StopRequest(console, settings.out))
