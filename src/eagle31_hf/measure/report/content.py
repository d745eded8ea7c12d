"""What the page says, in order: the answer first, then how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..record_file import Records
from ..run_tables import method_tables, number_text, run_notes
from ..summary import MethodSummary, RunSummary, Setting, summarise
from ..tables import DataTable
from .plots import Plot, draw_all


@dataclass(frozen=True)
class Part:
    """One setting of one run: its tables and plots."""

    anchor: str
    title: str
    words: str
    tables: tuple[DataTable, ...]
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Section:
    """One run: who was measured where, a part by setting, what figures cannot say, and how it was made."""

    anchor: str
    title: str
    conditions: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    provenance: DataTable


@dataclass(frozen=True)
class Page:
    """A title and a section for each run."""

    title: str
    sections: tuple[Section, ...]


def make_page(runs: Sequence[Records], *, title: str, price_per_hour: float | None = None) -> Page:
    """Everything the records say."""
    return Page(title, tuple(_section(f"run-{n}", records, price_per_hour) for n, records in enumerate(runs, 1)))


def _section(anchor: str, records: Records, price_per_hour: float | None) -> Section:
    summary = summarise(records, price_per_hour)
    run = summary.run
    place, pair, settings = run["machine"], run["pair"], run["settings"]
    conditions = (
        f"Target {pair['target']['name']}, drafter {pair['drafter']['name']}, {pair['dtype']}, on {place['device']} "
        f"({place['processor']}, {_count(place['threads'], 'thread')}). {_count(len(run['prompts']), 'prompt')}, "
        f"at most {settings['new_tokens']} new tokens, {_count(settings['repeats'], 'repeat')}."
    )
    ledgers = records.notes_of("ledger")
    parts = tuple(
        _part(f"{anchor}-{n}", setting, summary, ledgers[0] if ledgers else None)
        for n, setting in enumerate(summary.settings, 1)
    )
    notes = tuple(run_notes(summary))
    return Section(anchor, records.name.removesuffix(".jsonl"), conditions, parts, notes, _provenance(run))


def _part(anchor: str, setting: Setting, summary: RunSummary, ledger: dict[str, Any] | None) -> Part:
    methods = summary.of(setting)
    tables = method_tables(methods, on_page=True)
    if any(method.thinking.rounds for method in methods):
        tables.append(_thinking(methods))
    title = str(setting)
    plots = tuple(draw_all(anchor, methods, ledger, summary.run.get("counted", {}).get("memory", "")))
    return Part(anchor, title[0].upper() + title[1:], _words(methods), tuple(tables), plots)


def _words(methods: Sequence[MethodSummary]) -> str:
    """The result in a sentence or two."""
    told = [method for method in methods if method.drafts and method.speedup is not None]
    refused = [method.method for method in methods if method.refusal]
    words = ""
    if told:
        best = max(told, key=lambda method: method.speedup.median if method.speedup else 0.0)
        assert best.speedup is not None, "chosen by it"
        words = f"Fastest: {best.method}, {best.speedup.median:.2f} times plain generate"
        if best.by_compiler is not None and best.by_drafter is not None:
            words += f" ({best.by_compiler.median:.2f} by compiling, {best.by_drafter.median:.2f} by drafts)"
        words += "."
    if refused:
        words += f" No speedup is told of {', '.join(refused)}: answers were not the target's own."
    return words.strip()


def _thinking(methods: Sequence[MethodSummary]) -> DataTable:
    rows = [
        (method.method, number_text(method.thinking.acceptance_length, ".2f"),
         number_text(method.answering.acceptance_length, ".2f"))
        for method in methods
        if method.thinking.rounds or method.answering.rounds
    ]  # fmt: skip
    return DataTable("Acceptance length inside and outside <think>", ("method", "inside", "outside"), tuple(rows))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _provenance(run: dict[str, Any]) -> DataTable:
    pair, settings = run["pair"], run["settings"]
    facts = {
        "measured": run.get("started", ""),
        "command": run["command"],
        "commit": run.get("commit", ""),
        "versions": ", ".join(f"{n} {run[n]}" for n in ("eagle31_hf", "torch", "transformers", "python") if n in run),
        "processor": f"{run['machine']['processor']}, {_count(run['machine']['threads'], 'thread')}",
        "target": f"{pair['target']['name']} ({pair['target']['revision']})",
        "drafter": f"{pair['drafter']['name']} ({pair['drafter']['revision']})",
        "precision": f"{pair['dtype']}, quantisation {pair['quantisation']}, attention {pair.get('attention', '')}",
        "chat template": pair["template"],
        "seed": str(settings.get("seed", "")),
        "counted": ", ".join(f"{name}: {how}" for name, how in run.get("counted", {}).items()),
    }
    rows = tuple((name, str(value)) for name, value in facts.items() if value)
    return DataTable("Provenance", ("fact", "value"), rows)
