"""`eagle31 demo` and `eagle31 generate`: answers with accepted drafts coloured, and what drafting was worth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..drafter.assistant import NoDrafter
from ..errors import ConfigurationError
from ..generate.warm_up import warm_up
from ..measure.bench import Bench, has_graphs
from ..measure.origin import origin
from ..measure.results import FEWEST_NEW_TOKENS, BenchResult, BenchSettings, Task, pair_methods
from ..measure.tables import bench_notes, conditions_line, speed_table
from ..texts.decoder import IncrementalDecoder, RoundStreamer
from ..texts.prompts import Prompt, embedded_prompts
from .options import ACCEPTED_STYLE, JSON, MORE, StreamedText, command, legend, make_console, option, write_json
from .pairs import DraftOptions, LoadedPair, PairSource, load_pair
from .progress import counting_graphs, progress_bar, waiting_for

MOST_STREAMED = 2
DEMO_DRAFT_TOKENS = 7
"""As many as drafts by graphs have by default: the graphs that the demo leaves on a CPU serve `chat`, too."""

REPEATS = 3

COMPARE = option(
    True,
    "Also measure plain generate against EAGLE, by graphs too if those are asked for or kept.",
    "--compare/--no-compare",
)


@command
def demo(compare: bool = COMPARE, json_path: Path | None = JSON) -> None:
    """Watch the embedded pair write, then measure it against plain decoding. Needs no network."""
    # A fixed length: what is coloured does not depend on how fast this machine is.
    pair = load_pair(PairSource(), DraftOptions(draft_tokens=DEMO_DRAFT_TOKENS, schedule="constant"))
    settings = BenchSettings(pair_methods(by_graphs=True))
    _show(pair, embedded_prompts(), settings, compare=compare, json_path=json_path)


@command
def generate(
    *,
    source: PairSource,
    drafting: DraftOptions,
    prompt: str | None = option(None, "What to answer.", show_default=False),
    prompt_file: typer.FileText | None = option(
        None,
        "Read the prompt from this file; - is standard input.",
        encoding="utf-8",
        errors="surrogateescape",  # the chat template refuses what is no character
        panel=MORE,
    ),
    system: str | None = option(None, "System prompt.", panel=MORE),
    max_new_tokens: int = option(128, "Longest answer.", min=1),
    temperature: float = option(0.0, "0 is greedy.", min=0.0, max=5.0),
    seed: int | None = option(
        None, "Of the random numbers; the same seed writes the same text, in half precision up to rounding.", panel=MORE
    ),
    compare: bool = COMPARE,
    json_path: Path | None = JSON,
) -> None:
    """Answer a prompt with any pair, accepted drafts coloured, and measure plain generate against EAGLE."""
    if (prompt is None) == (prompt_file is None):
        raise ConfigurationError("got no prompt, or two; wanted one of --prompt and --prompt-file")
    question = {"role": "user", "content": prompt if prompt_file is None else prompt_file.read()}
    messages = (question,) if system is None else ({"role": "system", "content": system}, question)
    pair = load_pair(source, drafting)
    if seed is not None:
        torch.manual_seed(seed)
    settings = BenchSettings(new_tokens=max_new_tokens, temperature=temperature)
    if compare := compare and source.has_drafter:  # the table is about a drafter
        settings = replace(settings, methods=pair_methods(by_graphs=has_graphs(pair.drafter, settings)))
    _show(pair, [Prompt("your prompt", "yours", "yours", messages)], settings, compare=compare, json_path=json_path)


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(
    pair: LoadedPair, prompts: Sequence[Prompt], settings: BenchSettings, *, compare: bool, json_path: Path | None
) -> None:
    """The first answers as they are written, then the table; what `demo` and `generate` share."""
    console = make_console()
    tasks = pair.tasks(prompts)
    record: dict[str, Any] = {**origin(pair.drafter.binding), "target": pair.name}
    if pair.plan is not None:
        record["plan"] = pair.plan.to_dict()
    if pair.described != pair.name:
        console.print(pair.described, style="dim")
    for task in tasks[:MOST_STREAMED]:
        _stream(console, pair, task, settings)
    console.print()
    console.print(legend())
    assert pair.drafter.stats is not None, "an answer has been written"
    record["stats"] = pair.drafter.stats.to_dict()
    if compare:
        console.print()
        measured = replace(settings, new_tokens=max(settings.new_tokens, FEWEST_NEW_TOKENS), repeats=REPEATS)
        result = measure_in_turns(console, pair, tasks, measured)
        console.print(conditions_line(result, record))
        console.print(speed_table(result.methods))
        for line in bench_notes(result):
            console.print(line)
        record |= result.to_dict()
    else:
        console.print(str(pair.drafter.stats), style="dim", markup=False)
    write_json(json_path, record)


def _stream(console: Console, pair: LoadedPair, task: Task, settings: BenchSettings) -> None:
    """Show a prompt and its answer as it comes."""
    console.print()
    has_roles = bool(pair.tokenizer.chat_template)  # a base model goes on with the text as it is
    for message in task.prompt.messages:
        role = f"{message['role']}: " if has_roles else ""
        console.print(Text(role + message["content"], style="dim"))
    writer = StreamedText(console, "assistant: " if has_roles else "… ")
    streamer = RoundStreamer(
        IncrementalDecoder(pair.tokenizer),
        lambda text, accepted: writer.add(text, ACCEPTED_STYLE if accepted else ""),
    )
    target: Any = pair.target
    how = {**settings.to_generate(), "max_new_tokens": settings.new_tokens, "streamer": streamer}
    ids = task.ids[None]
    target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=pair.drafter, **how)
    writer.end()


def measure_in_turns(console: Console, pair: LoadedPair, tasks: Sequence[Task], settings: BenchSettings) -> BenchResult:
    """All calls of the settings, or those up to Ctrl-C; the console is told what takes its time."""
    if any(method.by_graphs for method in settings.methods):
        console.print("Compiling what no earlier run has left: minutes the first time, nothing the second.")
        tokens, how = settings.new_tokens + max(len(task.ids) for task in tasks), settings.to_generate()
        # For the pair and for its target alone. Where nothing can be kept the measured texts say why.
        with waiting_for("looking for graphs") as say, suppress(ConfigurationError):
            on_compile = counting_graphs(say)
            for assistant in (pair.drafter, NoDrafter(pair.drafter.binding.model)):
                warm_up(assistant, tokens=tokens, on_compile=on_compile, **how)
    minutes = settings.minutes
    measuring = f"measuring for at most {minutes:g} minute{'' if minutes == 1 else 's'}" if minutes else "measuring"
    with progress_bar(console) as advance:
        bench = Bench(pair.drafter, tasks, settings, on_turn=partial(advance, measuring))
        try:
            return bench.run()
        except KeyboardInterrupt:
            if not bench.result.turns:
                console.print("Stopped by Ctrl-C before anything was measured.")
                raise
            return replace(bench.result, interrupted=True)
