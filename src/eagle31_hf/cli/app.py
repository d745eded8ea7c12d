"""The `eagle31` command. A command's module is imported when it is called, so `--help` waits for neither torch nor
transformers."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from .. import __version__
from ..errors import removal
from .options import print_error

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
            _end_with_line(error, words, command)
            raise

    def load(self) -> Any:
        """The command itself."""
        from .progress import waiting_for

        name = self.name
        with waiting_for("starting"):  # torch and transformers take seconds
            gc.disable()  # what modules define stays: to look through it again and again takes a fifth of that
            try:
                module = import_module(f".{'generate' if name == 'demo' else name}", __package__)
            finally:
                gc.enable()
        if not gc.get_freeze_count():  # the first command of a process
            gc.freeze()
        _quiet_transformers()  # it may just have been imported
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(module, str(name)))
        return get_command(alone)


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
            _end_with_line(error, args)
            raise


def _end_with_line(error: Exception, words: Sequence[str], command: Any = None) -> None:
    """Leave with a usage error as one line: what to do instead, if what was asked for has gone, else what is wrong.

    Args:
        words: what the command was given, or `eagle31` itself.
    """
    if not hasattr(error, "format_message"):  # it is another error
        return
    values, name = dict(pairwise(words)), "" if command is None else f"{command.name} "
    # Of click's NoSuchOption, which typer may bring along; else it may be the command that is unknown.
    unknown = getattr(error, "option_name", None) or " ".join(words[:1])
    gone = next(filter(None, map(removal, (f"{name}{unknown}", *map(" ".join, values.items())))), None)
    line = error.format_message().strip().rstrip(".")
    wrong = next((each for each in getattr(getattr(error, "param", None), "opts", ()) if each in values), None)
    if wrong is not None:
        # typer asks pydantic: "Value error, ...", "Input should be a valid number, unable to parse string as a number".
        why = getattr(error, "message", line).removeprefix("Value error, ").rstrip(".")
        if why.startswith(prefix := "Input should be "):
            wanted = why.removeprefix(prefix).partition(",")[0]
            why = f"wanted {'a number ' * wanted.startswith(('greater', 'less'))}{wanted}"
        line = f"got {wrong} {values[wrong]}: {why}"
    advice = f"see eagle31 {name}--help"
    if line.endswith("(bit)"):
        advice = "write 4bit or 8bit"
    elif line.startswith("Got unexpected extra argument") and any("--drafter" in each.opts for each in command.params):
        advice = "name a drafter with --drafter"
    print_error(gone or f"{line}; {advice}")
    raise typer.Exit(2)


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
    bitsandbytes says of kernels it could download, and torch's compiler of CUDA where there is no card."""
    for name in ("bitsandbytes.backends.cpu.ops", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        said = import_module("transformers.utils.logging")
        said.disable_progress_bar()
        said.set_verbosity_error()
    else:  # it and huggingface_hub read these when they are imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a line for each time that a connection is tried again
