"""JSON lines that grow while a run goes on: written whole, kept through a kill, tied to the settings they came from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import TrainingError


def read_whole_lines(path: Path, header: dict[str, Any], *, identity: str = "id") -> list[dict[str, Any]]:
    """Rows written so far; a line cut short by a kill is removed. The settings go into a file beside `path`.

    Args:
        identity: a field that every row has.

    Raises:
        TrainingError: `path` was written with another `header`, or holds a line that cannot be read.
    """
    notes = path.with_suffix(".settings.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        notes.write_text(json.dumps(header), encoding="utf-8")
        return []
    stored = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    differing = [
        f"{name}: {stored.get(name)!r}, now {value!r}" for name, value in header.items() if stored.get(name) != value
    ]
    if differing:
        raise TrainingError(
            f"{path} was written otherwise ({'; '.join(differing)}); remove it to write again, or use its settings"
        )
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        for row in rows:
            row[identity]
        return rows
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} holds a damaged line ({error}); remove the file to write again") from error


def append_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
