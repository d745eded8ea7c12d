"""What the commands that measure share: a bar drawn between measurements, figures at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from ..evidence.provenance import origin
from ..evidence.tables import json_line
from .options import write_json


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[float], None]]:
    """A bar that is moved on by shares of 1, between measurements: drawing while one runs would slow it."""
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=1.0)

        def advance(share: float) -> None:
            progress.advance(task, share)
            progress.refresh()

        yield advance


def finish(json_path: Path | None, record: dict[str, Any]) -> None:
    """The figures and how they were made: into the file that was asked for, and as the last line.

    A terminal gets no such line: it would push the tables out of sight.
    """
    record = {**origin(), **record}
    write_json(json_path, record)
    if not sys.stdout.isatty():
        typer.echo(json_line(record))
