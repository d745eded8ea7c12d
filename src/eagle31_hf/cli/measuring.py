"""What the commands that measure share: a bar drawn between measurements, figures at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from ..evidence.provenance import origin
from ..evidence.tables import json_line
from .options import write_json

@contextmanager
def progress_bar(console: Console) -> Iterator[tuple[Progress, TaskID]]:
    """A bar and its task, complete at 1. It is to be refreshed between measurements: drawing would slow them."""
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        yield progress, progress.add_task("measuring", total=1.0)


def finish(json_path: Path | None, record: dict[str, Any]) -> None:
    """The figures and how they were made: into the file that was asked for, and as the last line.

    A terminal gets no such line: it would push the tables out of sight.
    """
    record = {**origin(), **record}
    write_json(json_path, record)
    if not sys.stdout.isatty():
        typer.echo(json_line(record))
