"""What the page says, in order: the answer first, then how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ratios import spread_texts, times_text
from ..record_file import Records
from ..run_tables import run_notes
from ..summary import MethodSummary, RunSummary, Setting, exact_text, summarise
from .plots import DataTable, Plot, draw_all


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
    """One run.

    Attributes:
        anchor, title: where links lead, and what they say.
        conditions: who was measured where, in a sentence.
        parts: by setting.
        notes: what figures cannot say.
        provenance: what it takes to do it again.
    """

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
    tables = [_speeds(methods), _reading(methods)]
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


def _speeds(methods: Sequence[MethodSummary]) -> DataTable:
    headings = ("method", "tokens/s", "speedup", "spread", "95 % over prompts", "by compiling", "by drafts",
                "acceptance length", "answers")  # fmt: skip
    rows = []
    for method in methods:
        accepts = method.acceptance_length
        cells = (
            method.method,
            f"{method.tok_per_s.median:.1f}",
            "refused" if method.speedup is None else f"{method.speedup.median:.2f}×",
            *spread_texts(method.speedup),
            times_text(method.by_compiler),
            times_text(method.by_drafter) if method.drafts else "",
            "" if accepts is None else f"{accepts:.2f}",
            exact_text(method.verdicts),
        )
        rows.append(cells)
    return _filled("Speed against plain generate", headings, rows)


def _reading(methods: Sequence[MethodSummary]) -> DataTable:
    headings = ("method", "first token, ms", "slowest 5 %, tokens/s", "variation", "peak, GB", "J per token",
                "price of 1M accepted tokens")  # fmt: skip
    rows = [
        (
            method.method,
            f"{method.first_token_s * 1e3:.0f}",
            _number(method.slow_tok_per_s, ".1f"),
            _number(method.variation, ".2f"),
            _number(None if method.peak_bytes is None else method.peak_bytes / 1e9, ".2f"),
            _number(method.joules_per_token, ".2f"),
            _number(method.price_per_million, ".2f"),
        )
        for method in methods
    ]
    return _filled("How the text comes, and what it takes", headings, rows)


def _thinking(methods: Sequence[MethodSummary]) -> DataTable:
    rows = [
        (method.method, _number(method.thinking.acceptance_length, ".2f"),
         _number(method.answering.acceptance_length, ".2f"))
        for method in methods
        if method.thinking.rounds or method.answering.rounds
    ]  # fmt: skip
    return DataTable("Acceptance length inside and outside <think>", ("method", "inside", "outside"), tuple(rows))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _filled(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> DataTable:
    """Without columns that no row has anything for; other empty cells get a dash."""
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    return DataTable(
        caption, tuple(headings[i] for i in kept), tuple(tuple(row[i] or "–" for i in kept) for row in rows)
    )


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
