"""One pair against plain decoding on a few prompts: what `eagle31 demo`, `generate` and `bench loop` show.

The same engine as `bench run` (`suite`), kept in memory instead of in a file of records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..drafter.drafter import Eagle31Drafter
from ..texts.prompts import Prompt
from ..trees.shape import DraftShape
from .calls import PLAIN, PLAIN_COMPILED, CallRecord
from .loop_report import LoopRecord
from .methods import requested_shape
from .provenance import run_facts
from .record_file import Records
from .run_settings import RunSettings
from .suite import BenchmarkRun, Task
from .summary import RunSummary, summarise


def pair_settings(
    drafter: Eagle31Drafter, *, new_tokens: int, temperature: float, repeats: int, compiled: bool
) -> RunSettings:
    """Plain `generate` and the loop that serves this drafter as its settings say, with `compiled` by graphs as well."""
    asked, trees_refused = drafter.generation_config, drafter.binding.tree_unsupported_reason
    eager = requested_shape(drafter, batch_size=1, sampled=temperature > 0, compiled=False)
    by_graphs = requested_shape(drafter, batch_size=1, sampled=temperature > 0, compiled=True)
    drafted = "stock loop" if trees_refused else _name(eager)
    methods: tuple[str, ...] = (PLAIN, drafted)
    if compiled and not trees_refused:
        methods = (PLAIN, PLAIN_COMPILED, drafted, f"{_name(by_graphs)} compiled")
    largest = by_graphs if compiled else eager
    tree: dict[str, Any] = {"tree_width": largest.top_k, "tree_size": max(3, largest.size)} if largest.is_tree else {}
    return RunSettings(
        new_tokens=new_tokens,
        temperatures=(temperature,),
        repeats=repeats,
        methods=methods,
        depth=asked.num_assistant_tokens,
        compiled=compiled,
        as_configured=True,
        ceilings=True,
        **tree,
    )


def _name(shape: DraftShape) -> str:
    return "tree" if shape.is_tree else "chain"


def measure_pair(
    drafter: Eagle31Drafter,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    settings: RunSettings,
    *,
    names: tuple[str | None, str | None] = (None, None),
    note: Callable[[dict[str, Any]], None] = lambda _: None,
    on_turn: Callable[[float], None] = lambda _: None,
    on_made: Callable[[int, int], None] = lambda made, of: None,
) -> RunSummary:
    """All methods on all tasks, in turns.

    Args:
        names: folder or Hub id of target and drafter; `None`: the embedded ones.
        note: told of each method's first text, compiling included, as it is written.
        on_turn: called between measurements with the share of all that the last one was.
        on_made: told how many graphs are compiled, of how many that were begun.
    """
    notes: list[dict[str, Any]] = []

    def keep(told: dict[str, Any]) -> None:
        notes.append(told)
        note(told)

    calls = measured_calls(BenchmarkRun(drafter, tasks, settings, note=keep, on_made=on_made), on_turn)
    facts = {**run_facts(drafter, tokenizer, names), "settings": settings.to_dict()}
    return summarise(Records("this run", facts | {"prompts": [task.prompt.id for task in tasks]}, calls, notes))


def measure_loops(
    drafter: Eagle31Drafter, prompts: Sequence[Tensor], settings: RunSettings, on_turn: Callable[[float], None]
) -> tuple[RunSummary, list[LoopRecord]]:
    """All methods on prompts `(T,)` of no name, texts of one length: what `eagle31 bench loop` shows."""
    notes: list[dict[str, Any]] = []
    tasks = [Task(Prompt(f"loop/{number}", "loop", "loop", ()), ids) for number, ids in enumerate(prompts)]
    run = BenchmarkRun(drafter, tasks, settings, note=notes.append)
    summary = summarise(Records("this run", {}, measured_calls(run, on_turn), notes))
    return summary, [LoopRecord(method, run.bare_costs(method)) for method in summary.methods]


def measured_calls(run: BenchmarkRun, on_turn: Callable[[float], None]) -> list[CallRecord]:
    """All of a run's calls."""
    calls: list[CallRecord] = []
    num_turns = len(run.turns)
    for turn in run.measure():
        calls += turn
        on_turn(1 / num_turns)
    return calls
