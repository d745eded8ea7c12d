"""The `eagle31` command."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..checkpoints import inspect_checkpoint, read_checkpoint, write_checkpoint
from ..checkpoints.formats import FORMATS, find_format
from ..demo import CONVERSATIONS, Messages
from . import bench as cli_bench
from . import comparison, terminal
from . import plan as cli_plan
from . import train as cli_train
from .options import JsonOption, TracebackOption, make_console, readable_errors, write_json
from .pairs import DecodingWishes, DeviceName, DTypeName, Pair, PairSource, encode, load_pair, write
from .processor import avoid_unusable_tiles

app = typer.Typer(
    name="eagle31",
    help="EAGLE 3.1 speculative decoding for Hugging Face transformers: the same text, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.add_typer(cli_bench.app)
app.command()(cli_plan.plan)
app.command(name="train")(cli_train.make_command())

STREAMED_IN_DEMO = 2


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
def demo(json_path: JsonOption = None, traceback: TracebackOption = False) -> None:
    """Watch the embedded pair write, then measure plain generate against EAGLE. Needs no network."""
    pair = load_pair(PairSource(dtype="bfloat16"))
    _show(pair, CONVERSATIONS, DecodingWishes(), json_path=json_path, streamed=STREAMED_IN_DEMO)


@app.command()
@readable_errors
def generate(
    prompt: Annotated[str, typer.Option(help="What to answer.", show_default=False)],
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; default: the embedded one.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder or Hub id of a drafter for that target.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[DTypeName, typer.Option(help="Precision; auto is as stored.")] = "auto",
    device: Annotated[DeviceName, typer.Option(help="Where to run.")] = "auto",
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in a round; default: by doubt.")
    ] = None,
    tree_width: Annotated[int, typer.Option(min=1, help="Children per draft token; 1 drafts a chain.")] = 1,
    tree_size: Annotated[int | None, typer.Option(min=2, help="Tokens verified per round with a tree.")] = None,
    compare: Annotated[bool, typer.Option(help="Also measure plain generate against EAGLE.")] = True,
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Answer a prompt with any pair, accepted drafts coloured, and measure plain generate against EAGLE."""
    drafting = {"num_assistant_tokens": draft_tokens, "draft_top_k": tree_width, "draft_tree_size": tree_size}
    pair = load_pair(PairSource(target, drafter, dtype, device, drafting))
    conversation = [{"role": "user", "content": prompt}]
    wishes = DecodingWishes(max_new_tokens, temperature)
    _show(pair, [conversation], wishes, json_path=json_path, streamed=1, compare=compare)


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


@app.command()
@readable_errors
def convert(
    source: CheckpointArgument,
    destination: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False, show_default=False)],
    format: Annotated[str, typer.Option(help=f"Layout to write: {', '.join(FORMATS)}.")] = "plain",
    revision: RevisionOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Write a drafter checkpoint in another layout; "plain" is the one vLLM and SGLang both read."""
    find_format(format)  # a misspelt name should not cost a download
    checkpoint = read_checkpoint(source, revision=revision)
    write_checkpoint(checkpoint, destination, format=format)
    make_console().print(f"{source} ({checkpoint.format}) → {destination} ({format})", soft_wrap=True)


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(
    pair: Pair,
    conversations: Sequence[Messages],
    wishes: DecodingWishes,
    *,
    json_path: Path | None,
    streamed: int,
    compare: bool = True,
) -> None:
    """Ceiling, streamed answers, table; what `demo` and `generate` share."""
    console = make_console()
    inputs = [encode(pair, conversation) for conversation in conversations]
    record: dict[str, Any] = {"target": pair.name, **comparison.describe_machine(pair)}
    if compare:
        expected = comparison.warm_up(pair, inputs, wishes).acceptance_length
        costs = comparison.measure_bare_costs(pair, inputs[0])
        record["bare_costs"] = {**vars(costs), "ceiling_speedup": costs.ceiling(expected)}
        console.print(terminal.ceiling_text(costs, expected))
    for conversation, prompt in zip(conversations[:streamed], inputs, strict=False):
        _stream(console, pair, conversation, prompt, wishes)
    console.print()
    console.print(terminal.legend())
    if compare:
        record |= _measure(console, pair, inputs, wishes)
    else:
        assert pair.drafter.stats is not None, "an answer has been written"
        console.print(terminal.stats_line(pair.drafter.stats))
        record["stats"] = pair.drafter.stats.to_dict()
    write_json(json_path, record)


def _stream(
    console: Console, pair: Pair, conversation: Messages, prompt: dict[str, Tensor], wishes: DecodingWishes
) -> None:
    console.print()
    for message in conversation:
        console.print(f"{message['role']}: {message['content']}", style="dim", markup=False)
    streamer = terminal.AcceptanceStreamer(pair.tokenizer, console, label="assistant: ")
    write(pair, prompt, wishes, with_drafter=True, streamer=streamer)


def _measure(
    console: Console, pair: Pair, inputs: Sequence[dict[str, Tensor]], wishes: DecodingWishes
) -> dict[str, Any]:
    # The bar is drawn between rounds only: drawing while a round runs would slow what is measured.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=comparison.TIMED_ROUNDS)

        def next_round() -> None:
            progress.advance(task)
            progress.refresh()

        result = comparison.compare(pair, inputs, wishes, rounds=comparison.TIMED_ROUNDS, on_round=next_round)
    machine = comparison.describe_machine(pair)
    console.print()
    console.print(terminal.conditions_line(result, machine))
    console.print(terminal.comparison_table(result))
    for note in terminal.comparison_notes(result, machine["dtype"]):
        console.print(note)
    return result.to_dict()
