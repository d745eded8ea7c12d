"""`eagle31 train`: one command from a target and prompts to a published drafter."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..training.settings import TrainingSettings
from .options import JsonOption, TracebackOption, make_console, readable_errors, write_json


def train(**options: Any) -> None:
    """Make a drafter for a target: let it write, distil, improve acceptance, publish. Prints its plan first."""
    json_path = options.pop("json_path")
    options.pop("traceback")
    # Here and not above: Trainer takes longer to import than every other command takes to start.
    from ..training.train import is_first_process, train_drafter

    settings = TrainingSettings(**{name: _as_field(value) for name, value in options.items()})
    report = train_drafter(settings, console=make_console(stderr=True))
    if is_first_process():
        write_json(json_path, report.to_dict())
        make_console().print(f"drafter written to {report.folder}")


def make_command() -> Any:
    """The command, its options read from `TrainingSettings`: one place says what a run can be told."""
    hints = get_type_hints(TrainingSettings)
    parameters = [_parameter(field, hints[field.name]) for field in fields(TrainingSettings)]
    parameters += [
        inspect.Parameter("json_path", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonOption),
        inspect.Parameter("traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=TracebackOption),
    ]
    command = readable_errors(train)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(field: Field, hint: Any) -> inspect.Parameter:
    flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
    if field.name == "target":
        option: Any = typer.Argument(help=text, show_default=False)
    else:
        shown = field.default not in (None, ())
        panel, hidden = field.metadata["group"], field.metadata.get("hidden", False)
        option = typer.Option(flag, help=text, show_default=shown, rich_help_panel=panel, hidden=hidden)
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    default = list(default) if isinstance(default, tuple) else default
    annotation: Any = Annotated[_plain(hint), option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _plain(hint: Any) -> Any:
    """`X | None` stays optional; a tuple becomes a repeatable option."""
    return list[get_args(hint)[0]] if get_origin(hint) is tuple else hint  # type: ignore[misc]


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
