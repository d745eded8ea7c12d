"""`eagle31 bench run`: methods against each other on prompts people know, into a file of records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..benchmark import run_tables
from ..benchmark.comparing import compare_runs
from ..benchmark.datasets import Prompt, embedded_prompts, read_prompts
from ..benchmark.exports import write_acceptance_csv, write_profile
from ..benchmark.gauges import gauge_names
from ..benchmark.provenance import run_facts
from ..benchmark.record_file import RecordWriter, read_records
from ..benchmark.run_settings import RunSettings, settings_facts
from ..benchmark.suite import NEVER_HERE, BenchmarkRun, Task
from ..benchmark.summary import summarise
from ..benchmark.thinking import ThinkMarks
from ..errors import ConfigurationError
from .measuring import DeviceOption, DTypeOption, finish, progress_bar
from .options import JsonOption, TracebackOption, make_console, readable_errors
from .pairs import Pair, PairSource, encode, load_pair, write_plain


def _list_of(kind: Callable[[str], Any], wanted: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = [-1]
        if any(not value >= 0 for value in values):
            raise typer.BadParameter(f"got {text!r}; wanted {wanted}")
        return text

    return check


Temperatures = Annotated[
    str, typer.Option(callback=_list_of(float, "temperatures, e.g. 0,1"), help="One or several; 0 is greedy.")
]
Batches = Annotated[str, typer.Option(callback=_list_of(int, "whole numbers, e.g. 1,8,32"), help="Batch sizes.")]


@readable_errors
def run(
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File of records (JSON lines) to write.", show_default=False)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; default: the embedded one.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder or Hub id of a drafter for that target.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]FILE or [NAME=]ORG/DATASET, several times; default: the embedded ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each, spread over its rows.")] = None,
    all_turns: Annotated[bool, typer.Option("--all-turns", help="Later turns of a prompt, too.")] = False,
    new_tokens: Annotated[int, typer.Option(min=3, help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of exactly that length.")] = False,
    temperature: Temperatures = "0",
    batch: Batches = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Passes over the prompts.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first repeat; every call's follows from it.")] = 0,
    methods: Annotated[str | None, typer.Option(help="Names, comma between them; default: all there are.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens drafted in a round.")] = None,
    tree_width: Annotated[int, typer.Option(min=2, help="Children per draft token of the tree.")] = 4,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with the tree.")] = 24,
    compile_steps: Annotated[bool, typer.Option("--compile", help="The compiled methods, too.")] = False,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of the machine, for the cost.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with records that were stopped.")] = False,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", dir_okay=False, help="Acceptance in the columns of speculators' CSV.")
    ] = None,
    profile_path: Annotated[
        Path | None,
        typer.Option("--profile", help="Folder of a checkpoint, or file: speculation_profile.json for it."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: is B's difference from A larger than the noise?", metavar="A B"),
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(help="With --compare: what may differ, by name.")] = None,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Methods against each other on MT-bench, HumanEval, GSM8K, Spec-Bench or your prompts, every answer checked."""
    console = make_console()
    if compare is not None:
        _compare(console, compare, allow or [], json_path)
        return
    if out is None:
        raise ConfigurationError("got no file to write to; pass --out run.jsonl, or --compare A.jsonl B.jsonl")
    settings = RunSettings(
        new_tokens=new_tokens,
        temperatures=tuple(float(part) for part in temperature.split(",")),
        batch_sizes=tuple(int(part) for part in batch.split(",")),
        repeats=repeats,
        seed=seed,
        methods=tuple(name.strip() for name in methods.split(",")) if methods else (),
        depth=draft_tokens,
        tree_width=tree_width,
        tree_size=tree_size,
        compiled=compile_steps,
        ignore_eos=ignore_eos,
    )
    settings.check()
    # The prompts first: a wrong path should not cost loading a model.
    chosen = read_prompts(prompts, limit) if prompts else embedded_prompts()[:limit]
    subject = Subject(
        load_pair(PairSource(target, drafter, dtype, device)),  # type: ignore[arg-type]
        chosen,
        (target, drafter),
        all_turns,
    )
    _measure(console, subject, settings, out, resume=resume, price_per_hour=price_per_hour)
    records = read_records(out)
    summary = summarise(records)
    for part in run_tables.run_parts(summary):
        console.print(part)
    if csv_path is not None:
        write_acceptance_csv(summary, csv_path)
    if profile_path is not None:
        write_profile(summary, profile_path)
    finish(json_path, summary.to_dict())


@dataclass(frozen=True)
class Subject:
    """What is measured: a pair, and prompts."""

    pair: Pair
    prompts: list[Prompt]
    names: tuple[str | None, str | None]
    all_turns: bool

    def tasks(self, new_tokens: int) -> list[Task]:
        """Each prompt; its later turns after answers that the target writes greedily, the same for all methods."""
        tasks = []
        for prompt in self.prompts:
            messages = list(prompt.messages)
            tasks.append(Task(prompt, encode(self.pair, messages)["input_ids"][0]))
            for number, turn in enumerate(prompt.later_turns if self.all_turns else (), 2):
                answer = write_plain(self.pair, messages, new_tokens)
                messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
                later = Prompt(f"{prompt.id}.{number}", prompt.suite, prompt.category, tuple(messages))
                tasks.append(Task(later, encode(self.pair, messages)["input_ids"][0]))
        return tasks


def _measure(
    console: Console,
    subject: Subject,
    settings: RunSettings,
    out: Path,
    *,
    resume: bool,
    price_per_hour: float | None,
) -> None:
    pair = subject.pair
    notes: list[dict[str, Any]] = []
    measured = BenchmarkRun(
        pair.drafter,
        subject.tasks(settings.new_tokens),
        settings,
        marks=ThinkMarks.of(pair.tokenizer),
        note=notes.append,
    )
    first_line = {
        **run_facts(pair.drafter, pair.tokenizer, subject.names),
        "counted": gauge_names(measured.peak, measured.energy),
        "price_per_hour": price_per_hour,
        "settings": {**settings_facts(settings), "all_turns": subject.all_turns},
        "prompts": [task.prompt.id for task in measured.tasks],
    }
    writer = RecordWriter(out, first_line, resume=resume)
    done = frozenset() if writer.done is None else frozenset(writer.done.turns)
    if writer.done is None:
        writer.write({"kind": "left-out", "method": name, "reason": why} for name, why in NEVER_HERE.items())
        ledger = measured.ledger()
        writer.write([] if ledger is None else [ledger])
    elif writer.done.cut_at:
        told = f"{out.name} broke off in line {writer.done.cut_at} ({writer.done.why_cut}); going on behind turn "
        console.print(Text(f"{told}{len(done)} of {len(measured.turns)}.", style="dim"))
    with progress_bar(console) as (progress, task):
        for count, calls in enumerate(measured.measure(done), len(done) + 1):
            writer.write(notes)
            notes.clear()
            writer.write_turn(calls)
            progress.update(task, completed=count / len(measured.turns))
            progress.refresh()
    writer.close()


def _compare(console: Console, files: tuple[Path, Path], allow: list[str], json_path: Path | None) -> None:
    before, after = (read_records(path) for path in files)
    compared = compare_runs(before, after, allow=allow)
    for part in run_tables.compared_parts(compared, before, after):
        console.print(part)
    finish(
        json_path,
        {
            "bench": "compare",
            "before": before.name,
            "after": after.name,
            "differences": [difference.to_dict() for difference in compared.differences],
            "told": list(compared.told),
        },
    )
