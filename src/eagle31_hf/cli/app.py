"""The `eagle31` command. A command's module is imported when it is called, so `--help` waits for neither torch nor
transformers."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from .. import __version__
from ..errors import removal

USE, MEASURE, MAKE = "Use", "Measure", "Make drafters"
COMMANDS = {
    "demo": (USE, "Watch the embedded pair write, then measure it against plain decoding. Needs no network."),
    "chat": (USE, "Chat with a pair: answers stream, history is not read twice, /help lists the commands."),
    "serve": (
        USE,
        "Serve OpenAI's API: chats, completions, streams, tools, JSON schemas; requests join and leave a running "
        "batch.",
    ),
    "generate": (
        USE,
        "Answer a prompt with any pair, accepted drafts coloured, and measure plain generate against EAGLE.",
    ),
    "plan": (USE, "Plan a run's memory from configurations alone. Exit code 1 if it does not fit."),
    "warmup": (USE, "Compile a pair's graphs for this machine, and keep them. Takes minutes, once."),
    "doctor": (MEASURE, "Examine a pair: does it fit, is the text exact, how much is accepted, is it set up right?"),
    "bench": (
        MEASURE,
        "Measure what a pair is worth here: plain generate, our loop, lookups and the drafter in turns.",
    ),
    "train": (
        MAKE,
        "Make a drafter for a target: the target writes, the drafter learns and is measured. Prints its plan first.",
    ),
    "mtp": (MAKE, "Take the MTP head out of a target, or put it back into a fine-tune that was saved without it."),
    "inspect": (MAKE, "Tell what a drafter checkpoint is, from its headers alone."),
    "convert": (
        MAKE,
        'Write a drafter checkpoint in another layout; "plain" is the one vLLM and SGLang both read.',
    ),
    "push": (MAKE, "Publish a drafter with its card and records; shows what would be uploaded unless told to upload."),
}
"""Heading and first line of each command's help, which `eagle31 --help` shows without importing it."""


class LazyCommand(TyperCommand):
    """A command by name and help; the real one takes its place when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        words = [word for arg in args for word in arg.split("=", 1)]  # reading them empties the list
        command = self.load()
        try:
            return command.make_context(info_name, args, parent=parent, **extra)
        except Exception as error:
            _explain_extra(error, command)
            option = getattr(error, "option_name", None)  # of click's NoSuchOption, which typer may bring along
            raise _explain_removal(error, f"{self.name} {option}", *map(" ".join, pairwise(words))) from None

    def load(self) -> Any:
        """The command itself."""
        from .progress import waiting_for

        name = self.name
        with waiting_for("starting"), _no_garbage():  # torch and transformers take seconds
            module = import_module(f".{'generate' if name == 'demo' else name}", __package__)
        _quiet_transformers()  # it may just have been imported
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(module, str(name)))
        return get_command(alone)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """What modules define stays, and looking through it for garbage again and again takes long while there is ever more
    of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # the first command of a process
            gc.freeze()
        if was_enabled:
            gc.enable()


class LazyCommands(TyperGroup):
    """All commands, none of them imported."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands = {
            name: LazyCommand(name=name, callback=None, help=help, rich_help_panel=panel)
            for name, (panel, help) in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            raise _explain_removal(error, args[0]) from None


def _explain_extra(error: Exception, command: Any) -> None:
    """A word too many is often a target, a drafter or a prompt: the line says which options take them."""
    takes = [name for option in command.params for name in option.opts if name in ("--target", "--drafter", "--prompt")]
    message = getattr(error, "message", "")
    if takes and message.startswith("Got unexpected extra argument"):
        error.message = f"{message}; name what it is, with {', '.join(takes)}"  # type: ignore[attr-defined]


def _explain_removal(error: Exception, *names: str) -> Exception:
    """The usage error `error`; its line says what to do instead if one of `names` is a command, an option or an
    option's value that has gone."""
    line = next((line for name in names if (line := removal(name)) is not None), None)
    if line is not None and hasattr(error, "message"):
        error.message = line
        vars(error).update(possibilities=())
    return error


app = typer.Typer(
    name="eagle31",
    cls=LazyCommands,
    help="EAGLE 3.1 speculative decoding for Hugging Face transformers: the same text, in half "
    "precision up to rounding, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Entry point of the `eagle31` script."""
    _write_in_any_encoding()
    app()


def _write_in_any_encoding() -> None:
    """A terminal or file may have an encoding without the characters of an answer or a table (cp1251, cp932, gbk):
    those become question marks. What cannot be read is noticed where the text is used."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # a tenth of what `--help` takes

        typer.echo(f"eagle31-hf {__version__} (transformers {version('transformers')})")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    _quiet_transformers()


def _quiet_transformers() -> None:
    """Its progress bars and advice about generation flags would stand between the lines of ours, as would what
    bitsandbytes says of kernels it could download."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        said = import_module("transformers.utils.logging")
        said.disable_progress_bar()
        said.set_verbosity_error()
    else:  # it and huggingface_hub read these when they are imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a line for each time that a connection is tried again
