"""`eagle31 demo` and `eagle31 generate`: answers with accepted drafts coloured, and what drafting was worth."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..decoding.calibration.bare_meter import BareCosts
from ..demo import CONVERSATIONS, Messages
from ..errors import ConfigurationError
from . import comparison, terminal
from .option_groups import expand_options
from .options import JsonOption, TracebackOption, make_console, readable_errors, write_json
from .pairs import DecodingWishes, Drafting, Pair, PairSource, encode, load_pair, write
from .plan import print_decision

STREAMED_IN_DEMO = 2


@readable_errors
def demo(json_path: JsonOption = None, traceback: TracebackOption = False) -> None:
    """Watch the embedded pair write, then measure plain generate against EAGLE. Needs no network."""
    pair = load_pair(PairSource())
    _show(pair, CONVERSATIONS, DecodingWishes(), json_path=json_path, streamed=STREAMED_IN_DEMO)


@expand_options
@readable_errors
def generate(
    source: PairSource,
    drafting: Drafting,
    prompt: Annotated[str | None, typer.Option(help="What to answer.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this file; - is standard input.", allow_dash=True)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; the same seed writes the same text.")] = None,
    compare: Annotated[bool, typer.Option(help="Also measure plain generate against EAGLE.")] = True,
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Answer a prompt with any pair, accepted drafts coloured, and measure plain generate against EAGLE."""
    question = {"role": "user", "content": _read_prompt(prompt, prompt_file)}
    conversation = [question] if system is None else [{"role": "system", "content": system}, question]
    console = make_console()
    pair = load_pair(source, drafting, on_plan=lambda plan: print_decision(console, plan))
    wishes = DecodingWishes(max_new_tokens, temperature)
    if seed is not None:
        torch.manual_seed(seed)
    _show(pair, [conversation], wishes, json_path=json_path, streamed=1, compare=compare)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigurationError("got no prompt, or two; wanted one of --prompt and --prompt-file")
    if file is None:
        assert prompt is not None
        return prompt
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the prompt file {str(file)!r} cannot be read: {error}") from error


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
    if pair.plan is not None:
        record["plan"] = pair.plan.to_dict()
    costs = None
    if compare:
        expected = comparison.warm_up(pair, inputs, wishes).acceptance_length
        costs = comparison.measure_bare_costs(pair, inputs[0])
        record["bare_costs"] = {**vars(costs), "ceiling_speedup": costs.ceiling(expected)}
        console.print(terminal.ceiling_text(costs, expected))
    for conversation, prompt in zip(conversations[:streamed], inputs, strict=False):
        _stream(console, pair, conversation, prompt, wishes)
    console.print()
    console.print(terminal.legend())
    if costs is not None:
        record |= _measure(console, pair, inputs, wishes, costs)
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
    console: Console, pair: Pair, inputs: Sequence[dict[str, Tensor]], wishes: DecodingWishes, costs: BareCosts
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
    if result.speedup < 1:
        console.print(terminal.slower_note(result, costs))
    return result.to_dict()
