"""Options that several commands take: a dataclass says once what they are, and a command asks for the dataclass.

@dataclass(frozen=True)
class Reading:
    depth: int = option("Levels read.", 3)

@expand_options
def command(reading: Reading) -> None: ...          # takes --depth
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

LOADING, DRAFTS, MORE = "Loading", "Drafts", "More"
"""Headings of a command's help below the options that most people need."""


def option(help: str, *flags: str, panel: str | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of a dataclass field that is a command line option.

    Args:
        flags: its names; default: the field's.
        panel: the heading of the help under which it stands; default: the first one.
        more: what else `typer.Option` takes.
    """
    return {"flags": flags, "option": {"help": help, "rich_help_panel": panel, **more}}


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclass parameters as options, in the dataclass's place."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(command)
    def expanded(**told: Any) -> None:
        for name, kind in groups.items():
            told[name] = kind(**{each.name: _as_field(told.pop(each.name), each) for each in fields(kind)})
        command(**told)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            parameters += [_parameter(each, kinds[each.name]) for each in fields(groups[name])]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameter(each: Field, hint: Any) -> inspect.Parameter:
    """A tuple becomes a repeatable option."""
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
    if "argument" in each.metadata:
        told: Any = typer.Argument(**each.metadata["argument"])
    else:
        flags = each.metadata["flags"] or (f"--{each.name.replace('_', '-')}",)
        told = typer.Option(*flags, **each.metadata["option"])
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    default = list(default) if isinstance(default, tuple) else default
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, told]
    )


def _as_field(value: Any, each: Field) -> Any:
    return tuple(value) if isinstance(value, list) and str(each.type).startswith("tuple") else value
