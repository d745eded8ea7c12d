"""What the commands that measure share: figures at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from ..evidence.provenance import origin
from ..evidence.tables import json_line
from .options import write_json


def finish(json_path: Path | None, record: dict[str, Any]) -> None:
    """The figures and how they were made: into the file that was asked for, and as the last line.

    A terminal gets no such line: it would push the tables out of sight.
    """
    record = {**origin(), **record}
    write_json(json_path, record)
    if not sys.stdout.isatty():
        typer.echo(json_line(record))
