"""A run's figures and a comparison of two: what tables say of them, on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from .comparing import PROCESSES_DIFFER, ComparedRuns
from .ratios import spread_texts, times_text
from .record_file import Records
from .summary import MethodSummary, RunSummary, Setting, exact_text
from .tables import REFUSED, DataTable


@dataclass(frozen=True)
class Column:
    """A figure of methods: its heading on a terminal and on a page, and what it is, empty where there is none."""

    heading: str
    on_page: str
    cell: Callable[[MethodSummary], str]


def number_text(value: float | None, spec: str) -> str:
    """A figure with so many digits; empty where there is none."""
    return "" if value is None else format(value, spec)


def speedup_text(method: MethodSummary) -> str:
    return times_text(method.speedup) or REFUSED


def ceiling_text(method: MethodSummary) -> str:
    return "" if method.ceiling is None else f"{method.ceiling:.2f}×"


def _by_drafter(method: MethodSummary) -> str:
    """Where nothing is compiled it is the speedup."""
    return times_text(method.by_drafter) if method.drafts and method.compiled else ""


def _of_ceiling(method: MethodSummary) -> str:
    return f"{method.speedup.median / method.ceiling:.0%}" if method.ceiling and method.speedup else ""


_TABLES = {
    "against plain generate": (
        Column("tokens/s", "tokens/s", lambda method: f"{method.tok_per_s.median:.1f}"),
        Column("speedup", "speedup", speedup_text),
        Column("spread", "spread", lambda method: spread_texts(method.speedup)[0]),
        Column("95 %", "95 % over prompts", lambda method: spread_texts(method.speedup)[1]),
        Column("accepts", "acceptance length", lambda method: number_text(method.acceptance_length, ".2f")),
    ),
    "where the speedup comes from": (
        Column("compiler", "by compiling", lambda method: times_text(method.by_compiler)),
        Column("drafter", "by drafts", _by_drafter),
        Column("ceiling", "ceiling", ceiling_text),
        Column("of ceiling", "of ceiling", _of_ceiling),
    ),
    "how the text comes": (
        Column("begins", "first token", lambda method: f"{method.first_token_s * 1e3:.0f} ms"),
        Column("slow 5 %", "slowest 5 %, tokens/s", lambda method: number_text(method.slow_tok_per_s, ".1f")),
        Column("varies", "variation", lambda method: number_text(method.variation, ".2f")),
        Column("answers", "answers", lambda method: exact_text(method.verdicts)),
        Column("peak", "peak of memory", lambda m: "" if m.peak_bytes is None else f"{m.peak_bytes / 1e9:.2f} GB"),
        Column("J/token", "J per token", lambda method: number_text(method.joules_per_token, ".2f")),
        Column("per 1M", "price of 1M accepted tokens", lambda m: number_text(m.price_per_million, ".2f")),
    ),
}
"""Speeds and how sure they are; what of them is the compiler's and what the drafter's, and the most that bare rounds
allow; what a reader notices, and what it takes."""


def method_tables(methods: Sequence[MethodSummary], *, on_page: bool = False) -> list[DataTable]:
    """The figures of methods in one setting."""
    tables = []
    for caption, columns in _TABLES.items():
        cells = ((method.method, *(column.cell(method) for column in columns)) for method in methods)
        if rows := tuple(row for row in cells if any(row[1:])):
            headings = ("method", *(column.on_page if on_page else column.heading for column in columns))
            shown = caption[0].upper() + caption[1:] if on_page else caption
            tables.append(DataTable(shown, headings, rows).filled("–" if on_page else ""))
    return tables


def setting_tables(setting: Setting, methods: Sequence[MethodSummary]) -> Iterator[Table]:
    """The same on a terminal."""
    for table in method_tables(methods):
        yield replace(table, caption=f"{setting}: {table.caption}").on_terminal()


def run_parts(summary: RunSummary) -> Iterator[Text | Table]:
    """Conditions, tables per setting, categories, notes."""
    run = summary.run
    place, pair = run["machine"], run["pair"]
    yield Text(
        f"{pair['target']['name']}, {place['device']} ({place['processor']}), {place['threads']} CPU threads, "
        f"{pair['dtype']}; {len(run['prompts'])} prompts, {run['settings']['repeats']} repeats",
        style="dim",
    )
    for setting in summary.settings:
        methods = summary.of(setting)
        yield from setting_tables(setting, methods)
        if any(len(method.categories) > 1 for method in methods):
            yield category_table(setting, methods)
    for note in run_notes(summary):
        yield Text(note, style="dim")


def category_table(setting: Setting, methods: list[MethodSummary]) -> Table:
    """Speedup and acceptance length of each category."""
    drafting = [method for method in methods if method.drafts]
    rows = []
    for name in dict.fromkeys(name for method in drafting for name in method.categories):
        cells = []
        for part in (method.categories.get(name) for method in drafting):
            accepts = "" if part is None or part.acceptance_length is None else f" ({part.acceptance_length:.2f})"
            cells.append("" if part is None else speedup_text(part) + accepts)
        rows.append((name, *cells))
    headings = ("category", *(method.method for method in drafting))
    caption = f"{setting}: speedup (acceptance length) by category"
    # A narrow terminal gets both figures, below each other.
    return DataTable(caption, headings, tuple(rows)).on_terminal(wraps=True)


def run_notes(summary: RunSummary) -> list[str]:
    """What tables cannot say."""
    notes = [f"Left out: {name}: {reason}." for name, reason in summary.left_out.items()]
    named = [(f"{method.method}, {method.setting}", method) for method in summary.methods]
    notes += [f"{name}: no speedup is told, since {method.refusal}." for name, method in named if method.refusal]
    graphs, seconds = summary.compiled
    notes += [f"{graphs} graphs were compiled in {seconds:.0f} s and kept."] if graphs else []
    waits = [(name, seconds) for (name, _), seconds in summary.warm_up_s.items() if name.endswith("compiled")]
    notes += [f"{name}: {seconds:.0f} s before its first text." for name, seconds in waits]
    for name, method in named:
        reasons = sorted({call.served_by for call in method.calls if ":" in call.served_by})
        # Of generation/routing.py's reasons one is no surprise.
        notes += [f"{name}: {served}." for served in reasons if not served.endswith(": asked for")]
    for name, method in named:
        if method.thinking.rounds:
            inside, outside = method.thinking.acceptance_length, method.answering.acceptance_length
            told = f"{inside:.2f} inside <think>, {'none' if outside is None else f'{outside:.2f}'} outside"
            notes.append(f"{name}: acceptance length {told}.")
    return notes + ([f"{summary.cut}; figures are of what comes before."] if summary.cut else [])


def compared_parts(compared: ComparedRuns, before: Records, after: Records) -> Iterator[Text | Table]:
    """One line per figure, and whether its difference is larger than the noise."""
    headings = ("method", "figure", "before", "after", "ratio", "95 %", "verdict")
    for setting in dict.fromkeys(found.setting for found in compared.differences):
        rows = tuple(
            (found.method, found.what.removesuffix(" length"), f"{found.before:.2f}", f"{found.after:.2f}",
             f"{found.ratio:.3f}", f"{found.interval[0]:.2f}–{found.interval[1]:.2f}", found.verdict)
            for found in compared.differences
            if found.setting == setting
        )  # fmt: skip
        yield DataTable(f"{before.name} → {after.name}: {setting}", headings, rows).on_terminal(left=2)
    yield Text(
        "A ratio whose 95 % interval holds 1 is within the noise of prompts and repeats; speedups of one code differ "
        f"by up to {PROCESSES_DIFFER:.0%} from process to process as well.",
        style="dim",
    )
    notes = [records.cut for records in (before, after) if records.cut]
    notes += [f"The runs also differ in {line}" for line in compared.told]
    yield from (Text(f"{note}.", style="dim") for note in notes)
