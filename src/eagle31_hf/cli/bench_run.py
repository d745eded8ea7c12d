"""`eagle31 bench run`: methods against each other on prompts people know, into a file of records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ..errors import ConfigurationError
from ..generation_config import USUAL_TREE
from ..measure import run_tables
from ..measure.calls import ThinkMarks
from ..measure.comparing import compare_runs
from ..measure.exports import write_acceptance_csv, write_profile
from ..measure.provenance import origin, run_facts
from ..measure.record_file import RecordWriter, check_place, read_records
from ..measure.run_settings import RunSettings
from ..measure.suite import NEVER_HERE, BenchmarkRun, Task
from ..measure.summary import RunSummary, summarise
from ..texts.prompts import Prompt, embedded_prompts, read_prompts
from .option_groups import expand_options, option
from .options import JsonOption, TracebackOption, make_console, readable_errors, write_json
from .pairs import Drafting, LoadedPair, PairSource, encode, load_pair
from .plan import print_decision
from .progress import progress_bar


def list_of(kind: Callable[[str], Any], wanted: str, at_least: int = 0) -> Callable[[str | None], str | None]:
    """A check of an option that holds numbers with commas between them, where it is given."""

    def check(text: str | None) -> str | None:
        try:
            values = [kind(part) for part in text.split(",")] if text is not None else []
        except ValueError:
            values = [-1]
        if any(not value >= at_least for value in values):
            raise typer.BadParameter(f"got {text!r}; wanted {wanted}")
        return text

    return check


NOT_TOLD = "not told by this machine"


def finish(json_path: Path | None, record: dict[str, Any]) -> None:
    """The figures and how they were made: into the file that was asked for, and as the last line of what is kept."""
    record = {**origin(), **record}
    write_json(json_path, record)
    if not sys.stdout.isatty():  # on a terminal it would push the tables out of sight
        typer.echo(json.dumps(record, default=str))


@dataclass(frozen=True)
class PromptOptions:
    """What is answered."""

    prompts: list[str] | None = field(
        default=None,
        metadata=option("[NAME=]FILE or [NAME=]ORG/DATASET, several times; default: the embedded ones."),
    )
    limit: int | None = field(default=None, metadata=option("Most prompts of each, spread over its rows.", min=1))
    all_turns: bool = field(default=False, metadata=option("Later turns of a prompt, too.", "--all-turns"))

    def read(self) -> list[Prompt]:
        return read_prompts(self.prompts, self.limit) if self.prompts else embedded_prompts()[: self.limit]


@dataclass(frozen=True)
class MethodOptions:
    """How each method answers."""

    new_tokens: int = field(default=128, metadata=option("Most tokens of an answer.", min=3))
    ignore_eos: bool = field(default=False, metadata=option("Answers of exactly that length.", "--ignore-eos"))
    temperature: str = field(
        default="0",
        metadata=option("One or several; 0 is greedy.", callback=list_of(float, "temperatures, e.g. 0,1")),
    )
    batch: str = field(
        default="1", metadata=option("Batch sizes.", callback=list_of(int, "whole numbers, e.g. 1,8,32"))
    )
    repeats: int = field(default=3, metadata=option("Passes over the prompts.", min=1))
    seed: int = field(default=0, metadata=option("Of the first repeat; every call's follows from it.", min=0))
    methods: str | None = field(default=None, metadata=option("Names, comma between them; default: all there are."))
    draft_tokens: int | None = field(default=None, metadata=option("Tokens drafted in a round.", min=1))
    tree_width: int = field(default=USUAL_TREE.top_k, metadata=option("Children per draft token of the tree.", min=2))
    tree_size: int = field(default=USUAL_TREE.nodes, metadata=option("Tokens verified per round with the tree.", min=3))
    compile_steps: bool = field(default=False, metadata=option("The compiled methods, too.", "--compile"))
    ceilings: bool = field(
        default=False,
        metadata=option("Time bare rounds beside each text: the speedup they allow.", "--ceilings"),
    )

    def to_settings(self, *, compiled: bool) -> RunSettings:
        """Checked."""
        settings = RunSettings(
            new_tokens=self.new_tokens,
            temperatures=tuple(float(part) for part in self.temperature.split(",")),
            batch_sizes=tuple(int(part) for part in self.batch.split(",")),
            repeats=self.repeats,
            seed=self.seed,
            methods=tuple(name.strip() for name in self.methods.split(",")) if self.methods else (),
            depth=self.draft_tokens,
            tree_width=self.tree_width,
            tree_size=self.tree_size,
            compiled=self.compile_steps or compiled,
            ignore_eos=self.ignore_eos,
            ceilings=self.ceilings,
        )
        settings.check()
        return settings


@dataclass(frozen=True)
class ExportOptions:
    """What else is written of the figures."""

    csv_path: Path | None = field(
        default=None, metadata=option("Acceptance in the columns of speculators' CSV.", "--csv", dir_okay=False)
    )
    profile_path: Path | None = field(
        default=None,
        metadata=option("Folder of a checkpoint, or file: speculation_profile.json for it.", "--profile"),
    )

    def write(self, summary: RunSummary) -> None:
        if self.csv_path is not None:
            write_acceptance_csv(summary, self.csv_path)
        if self.profile_path is not None:
            write_profile(summary, self.profile_path)


@expand_options
@readable_errors
def run(
    *,
    source: PairSource,
    chosen: PromptOptions,
    how: MethodOptions,
    exports: ExportOptions,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File of records (JSON lines) to write.", show_default=False)
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of the machine, for the cost.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with records that were stopped.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: is B's difference from A larger than the noise?", metavar="A B"),
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(help="With --compare: what may differ, by name.")] = None,
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
    settings = how.to_settings(compiled=source.acceleration == "compile")
    # The files first: a wrong path should not cost loading a model.
    check_place(out, resume=resume)
    prompts = chosen.read()
    drafting = Drafting(schedule="constant")  # whoever compares two runs compares the same lengths
    rows = max(settings.batch_sizes)
    pair = load_pair(source, drafting, batch=rows, on_plan=lambda plan: print_decision(console, plan))
    subject = Subject(pair, prompts, (source.target, source.drafter), chosen.all_turns)
    _measure(console, subject, settings, out, resume=resume, price_per_hour=price_per_hour)
    summary = summarise(read_records(out))
    for part in run_tables.run_parts(summary):
        console.print(part)
    exports.write(summary)
    finish(json_path, summary.to_dict())


@dataclass(frozen=True)
class Subject:
    """What is measured: a pair, and prompts."""

    pair: LoadedPair
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
                answer = self._plain_answer(tasks[-1].ids, new_tokens)
                messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
                later = Prompt(f"{prompt.id}.{number}", prompt.suite, prompt.category, tuple(messages))
                tasks.append(Task(later, encode(self.pair, messages)["input_ids"][0]))
        return tasks

    def _plain_answer(self, ids: Tensor, new_tokens: int) -> str:
        """The target's own greedy answer as text, without marks."""
        target: Any = self.pair.target
        told = {"attention_mask": torch.ones_like(ids[None]), "max_new_tokens": new_tokens, "do_sample": False}
        answer = target.generate(input_ids=ids[None], **told)[0, len(ids) :]
        return str(self.pair.tokenizer.decode(answer, skip_special_tokens=True))


def _measure(
    console: Console, subject: Subject, settings: RunSettings, out: Path, *, resume: bool, price_per_hour: float | None
) -> None:
    pair, tasks = subject.pair, subject.tasks(settings.new_tokens)
    notes: list[dict[str, Any]] = []
    measured = BenchmarkRun(pair.eagle, tasks, settings, marks=ThinkMarks.of(pair.tokenizer), note=notes.append)
    num_turns = len(measured.turns)
    first_line = {
        **run_facts(pair.eagle, pair.tokenizer, subject.names),
        "counted": {"memory": measured.peak.source or NOT_TOLD, "energy": measured.energy.source or NOT_TOLD},
        "price_per_hour": price_per_hour,
        "settings": {**settings.to_dict(), "all_turns": subject.all_turns},
        "prompts": [task.prompt.id for task in tasks],
    }
    writer = RecordWriter(out, first_line, resume=resume)
    done = frozenset(writer.done.turns if writer.done is not None else ())
    if writer.done is None:
        writer.write({"kind": "left-out", "method": name, "reason": why} for name, why in NEVER_HERE.items())
        ledger = measured.ledger()
        writer.write([] if ledger is None else [ledger])
    elif writer.done.cut_at:
        told = f"{out.name} broke off in line {writer.done.cut_at} ({writer.done.why_cut}); going on behind turn "
        console.print(Text(f"{told}{len(done)} of {num_turns}.", style="dim"))
    kept = len(done)
    try:
        with progress_bar(console) as advance:
            advance(kept / num_turns)
            for calls in measured.measure(done):
                writer.write(notes)
                notes.clear()
                writer.write_turn(calls)
                kept += 1
                advance(1 / num_turns)
    except KeyboardInterrupt:
        told = f"stopped: {out.name} keeps {kept} of {num_turns} turns; "
        make_console(stderr=True).print(f"{told}the same command with --resume goes on", markup=False)
        raise
    writer.close()


def _compare(console: Console, files: tuple[Path, Path], allow: list[str], json_path: Path | None) -> None:
    before, after = (read_records(path) for path in files)
    compared = compare_runs(before, after, allow=allow)
    for part in run_tables.compared_parts(compared, before, after):
        console.print(part)
    record = {"bench": "compare", "before": before.name, "after": after.name, "told": list(compared.told)}
    finish(json_path, record | {"differences": [difference.to_dict() for difference in compared.differences]})
