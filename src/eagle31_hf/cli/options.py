"""What commands share: options, errors as one line, the console, the figures' file.

A dataclass says once what options several commands take, and a command asks for the dataclass:

    @dataclass(frozen=True)
    class Reading:
        depth: int = option(3, "Levels read.")

    @command
    def tell(reading: Reading) -> None: ...          # takes --depth and --traceback
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError, Eagle31Error

LOADING, DRAFTS, MORE = "Loading", "Drafts", "More"
"""Headings of a command's help below the options that most people need."""
WIDTH = 100
"""Most columns that text and tables take."""
ACCEPTED_STYLE = "green"
NEW_TOKENS = "--max-new-tokens", "--new-tokens"
"""The name that all commands have, and the one that some had."""
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
"""What plots can be."""
MOST_TOKENS = 2**22
"""Of a row that is planned or served."""


def writable_json(path: Path | None) -> Path | None:
    """The path, if a file can be made there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    return path


def writable_plot(path: Path | None) -> Path | None:
    """The path, if a picture can be drawn there."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"wanted a name that ends in {', '.join(PICTURES)}")
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "plots need matplotlib: pip install matplotlib, or this package with its extra 'bench'"
        )
    return writable_json(path)


def token_count(text: str) -> int:
    """`"32768"`, `"32,768"` and `"32k"` are one number of tokens."""
    found = re.fullmatch(r"([\d,_]+)(k?)", text.strip().lower())
    digits = re.sub(r"\D", "", found[1]) if found is not None else ""
    count = int(digits or 0) * (1024 if found is not None and found[2] else 1)
    if not 1 <= count <= MOST_TOKENS:
        raise typer.BadParameter(f"wanted a number of tokens, at most {MOST_TOKENS:,}, e.g. 8192 or 32k")
    return count


# --- commands ---------------------------------------------------------------------------------------------------------


def option(default: Any, help: str, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """A field of a dataclass, or a parameter's default, that is a command line option.

    Args:
        flags: its names; default: the field's.
        panel: the heading of the help under which it stands; default: the first one.
        more: what else `typer.Option` takes.
    """
    metadata = {"flags": flags, "option": {"help": help, "rich_help_panel": panel, **more}}
    return field(default=default, metadata=metadata)


def argument(help: str, default: Any = MISSING, **more: Any) -> Any:
    """As `option`, of what is given without a name."""
    return field(default=default, metadata={"argument": {"help": help, "show_default": False, **more}})


JSON = option(
    None, "Also write the figures to this file.", "--json", dir_okay=False, callback=writable_json, panel=MORE
)
TRACEBACK = option(False, "Show the whole traceback of an error.", "--traceback", panel=MORE)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command: its parameters are made by `option` and `argument`, or dataclasses whose fields are.

    Errors of our tree become one red line on stderr and exit code 1; `--traceback` lets them through.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(function)
    def expanded(*, traceback: bool, **given: Any) -> None:
        try:
            for name, kind in groups.items():
                given[name] = kind(**{each.name: _as_field(given.pop(each.name), each) for each in fields(kind)})
            function(**given)
        except Eagle31Error as error:
            if traceback:
                raise
            print_error(error)
            raise typer.Exit(1) from error

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            parameters += [_parameter(each.name, each, kinds[each.name]) for each in fields(groups[name])]
        else:
            parameters.append(_parameter(name, parameter.default, hints[name]))
    parameters.append(_parameter("traceback", TRACEBACK, bool))
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameter(name: str, each: Field, hint: Any) -> inspect.Parameter:
    """A tuple becomes a repeatable option."""
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
    if "argument" in each.metadata:
        told: Any = typer.Argument(**each.metadata["argument"])
    else:
        flags = each.metadata["flags"] or (f"--{name.replace('_', '-')}",)
        told = typer.Option(*flags, **each.metadata["option"])
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    default = list(default) if isinstance(default, tuple) else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, told])


def _as_field(value: Any, each: Field) -> Any:
    return tuple(value) if isinstance(value, list) and str(each.type).startswith("tuple") else value


# --- what is printed and written --------------------------------------------------------------------------------------


def print_error(error: Exception | str) -> None:
    """One line on stderr, which a terminal gets wrapped at words."""
    console = make_console(stderr=True)
    console.print(error_line(error), soft_wrap=not console.is_terminal)


def error_line(error: Exception | str) -> Text:
    """One readable line for an error of ours."""
    return Text.assemble(("error: ", "bold red"), (str(error), "red"))


def make_console(*, stderr: bool = False) -> Console:
    """A console no wider than our tables are made for."""
    made = Console(stderr=stderr, highlight=False)
    made.width = min(made.width, WIDTH)
    return made


class StreamedText:
    """Text on a console as it comes, which the terminal wraps.

    Args:
        console: where to write.
        label: written before the text, with its first piece: what is logged until then has lines of its own.
    """

    def __init__(self, console: Console, label: str = ""):
        self._console, self._label = console, label

    def add(self, text: str, style: str = "") -> None:
        """Write on."""
        if text:
            self._console.print(Text.assemble((self._label, "dim"), (text, style)), end="", soft_wrap=True)
            self._label = ""

    def end(self) -> None:
        """End the line."""
        self._console.print()


def legend() -> Text:
    """What the colours of a streamed text mean."""
    return Text.assemble(
        ("drafted and accepted", ACCEPTED_STYLE), ("  ·  ", "dim"), "the target's own tokens", style="italic"
    )


def plain_table(rows: Iterable[Sequence[str | Text]], *header: str) -> Table:
    """Rows without lines between them; without a header the first cell of each is its heading."""
    table = Table(*header, show_header=bool(header), box=None, pad_edge=False)
    if not header:
        table.add_column(style="dim")
        table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write the figures if a path was given."""
    if path is not None:
        _write(path, "--json", json.dumps(record, indent=2, default=str) + "\n")


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"got {option} {str(path)!r}, which cannot be written ({error.strerror}); wanted a file in a folder that "
            "is there"
        ) from error
