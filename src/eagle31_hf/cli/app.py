"""The `eagle31` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import transformers
import typer

from ..checkpoints import inspect_checkpoint
from . import bench as cli_bench
from . import chat as cli_chat
from . import convert as cli_convert
from . import doctor as cli_doctor
from . import generate as cli_generate
from . import plan as cli_plan
from . import push as cli_push
from . import report as cli_report
from . import serve as cli_serve
from . import terminal
from . import train as cli_train
from . import warmup as cli_warmup
from .options import JsonOption, TracebackOption, make_console, readable_errors, write_json
from .processor import avoid_unusable_tiles

app = typer.Typer(
    name="eagle31",
    help="EAGLE 3.1 speculative decoding for Hugging Face transformers: the same text, in half "
    "precision up to rounding, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.command()(cli_generate.demo)
app.command()(cli_generate.generate)
app.command()(cli_plan.plan)
app.command()(cli_report.report)
app.command()(cli_convert.convert)
app.command()(cli_chat.chat)
app.command()(cli_serve.serve)
app.command()(cli_warmup.warmup)
app.add_typer(cli_bench.app)
app.command()(cli_push.push)
app.command(name="train")(cli_train.make_command())
app.command()(cli_doctor.doctor)

RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
CheckpointArgument = Annotated[str, typer.Argument(help="Folder or Hub id of a drafter.", show_default=False)]


def main() -> None:
    """Entry point of the `eagle31` script."""
    avoid_unusable_tiles()
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eagle31-hf {version('eagle31-hf')} (transformers {transformers.__version__})")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    # Stock progress bars and advice about generation flags would stand between the lines of ours.
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


@app.command()
@readable_errors
def inspect(
    path_or_id: CheckpointArgument,
    revision: RevisionOption = None,
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Tell what a drafter checkpoint is, from its headers alone, and which engines read it."""
    summary = inspect_checkpoint(path_or_id, revision=revision)
    console = make_console()
    console.print(terminal.summary_table(summary))
    console.print()
    console.print(terminal.tensor_table(summary))
    write_json(json_path, summary.to_dict())
