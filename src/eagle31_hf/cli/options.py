"""What commands share: options, errors as one line, the console, the figures' file."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError, Eagle31Error
from .option_groups import MORE

WIDTH = 100
"""Most columns that text and tables take."""
DRAWN_WIDTH = 80
"""Columns of a picture."""


def writable_json(path: Path | None) -> Path | None:
    """The path, if a file can be made there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        callback=writable_json,
        help="Also write the figures to this file.",
        rich_help_panel=MORE,
    ),
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="Show the whole traceback of an error.", rich_help_panel=MORE)
]


def token_count(text: str) -> int:
    """`"32768"`, `"32,768"` and `"32k"` are one number of tokens."""
    found = re.fullmatch(r"([\d,_]+)(k?)", text.strip().lower())
    digits = re.sub(r"\D", "", found[1]) if found is not None else ""
    if found is None or int(digits or 0) < 1:
        raise typer.BadParameter("wanted a number of tokens, e.g. 8192 or 32k")
    return int(digits) * (1024 if found[2] else 1)


def readable_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Errors of our tree become one red line on stderr and exit code 1; `--traceback` lets them through."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except Eagle31Error as error:
            if kwargs["traceback"]:
                raise
            print_error(error)
            raise typer.Exit(1) from error

    return wrapped


def print_error(error: Exception | str) -> None:
    """One line on stderr, which a terminal gets wrapped at words."""
    console = make_console(stderr=True)
    console.print(error_line(error), soft_wrap=not console.is_terminal)


def error_line(error: Exception | str) -> Text:
    """One readable line for an error of ours."""
    return Text.assemble(("error: ", "bold red"), (str(error), "red"))


def count(number: int, noun: str) -> str:
    """`"1 token"`, `"1,024 tokens"`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def make_console(*, stderr: bool = False) -> Console:
    """A console no wider than our tables are made for."""
    made = Console(stderr=stderr, highlight=False)
    made.width = min(made.width, WIDTH)
    return made


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write the figures if a path was given."""
    if path is not None:
        _write(path, "--json", json.dumps(record, indent=2, default=str) + "\n")


def write_svg(path: Path | None, lines: Sequence[Text], title: str) -> None:
    """Draw lines, wrapped at words, if a path was given. The picture loads no font from elsewhere."""
    if path is not None:
        console = Console(record=True, file=io.StringIO(), width=DRAWN_WIDTH, highlight=False)
        console.print(*lines, sep="\n")
        drawn = console.export_svg(title=title, unique_id=title.replace(" ", "-"))
        _write(path, "--svg", re.sub(r" *@font-face {.*?}\n", "", drawn, flags=re.S))


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"got {option} {str(path)!r}, which cannot be written ({error.strerror}); wanted a file in a folder that "
            "is there"
        ) from error
