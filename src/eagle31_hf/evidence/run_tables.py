"""A run's figures and a comparison of two, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from .comparing import PROCESSES_DIFFER, ComparedRuns
from .ratios import spread_texts, times_text
from .record_file import Records
from .summary import MethodSummary, RunSummary, Setting, exact_text
from .tables import make_table, without_empty_columns


def run_parts(summary: RunSummary) -> Iterator[Text | Table]:
    """Conditions, a table per setting, acceptance, categories, notes."""
    yield _conditions(summary)
    for setting in summary.settings:
        methods = summary.of(setting)
        yield speed_table(setting, methods)
        shares = shares_table(setting, methods)
        if shares.rows:
            yield shares
        yield text_table(setting, methods)
        if any(len(method.categories) > 1 for method in methods):
            yield category_table(setting, methods)
    for note in run_notes(summary):
        yield Text(note, style="dim")


def _conditions(summary: RunSummary) -> Text:
    run = summary.run
    place, pair = run["machine"], run["pair"]
    prompts = f"{len(run['prompts'])} prompts, {run['settings']['repeats']} repeats"
    return Text(
        f"{pair['target']['name']}, {place['device']} ({place['processor']}), {place['threads']} CPU threads, "
        f"{pair['dtype']}; {prompts}",
        style="dim",
    )


def speed_table(setting: Setting, methods: list[MethodSummary]) -> Table:
    """Speeds, and how sure they are."""
    headings = ("tokens/s", "speedup", "spread", "95 %", "accepts")
    table = make_table(f"{setting}: against plain generate", ("method",), headings)
    for method in methods:
        accepts = method.acceptance_length
        table.add_row(
            method.method,
            f"{method.tok_per_s.median:.1f}",
            speedup_text(method),
            *spread_texts(method.speedup),
            "" if accepts is None else f"{accepts:.2f}",
        )
    return table


def shares_table(setting: Setting, methods: list[MethodSummary]) -> Table:
    """What of a speedup is the compiler's and what the drafter's, and the most that bare rounds allow."""
    table = make_table(
        f"{setting}: where the speedup comes from", ("method",), ("compiler", "drafter", "ceiling", "of ceiling")
    )
    has_compiled = any(method.is_compiled for method in methods)
    for method in methods:
        drafter = times_text(method.by_drafter) if method.drafts and has_compiled else ""
        ceiling, reached = "", ""
        if method.ceiling is not None:
            ceiling = f"{method.ceiling:.2f}×"
            reached = "" if method.speedup is None else f"{method.speedup.median / method.ceiling:.0%}"
        if any(told := (times_text(method.by_compiler), drafter, ceiling, reached)):
            table.add_row(method.method, *told)
    return without_empty_columns(table)


def speedup_text(method: MethodSummary) -> Text:
    if method.speedup is None:
        return Text("refused", style="bold red")
    return Text(f"{method.speedup.median:.2f}×", style="bold")


def text_table(setting: Setting, methods: list[MethodSummary]) -> Table:
    """What a reader notices: when the text begins, how steadily it comes, whether it is right; and what it takes."""
    headings = ("begins", "slow 5 %", "varies", "answers", "peak", "J/token", "per 1M")
    table = make_table(f"{setting}: how the text comes", ("method",), headings)
    for method in methods:
        table.add_row(
            method.method,
            f"{method.first_token_s * 1e3:.0f} ms",
            "" if method.slow_tok_per_s is None else f"{method.slow_tok_per_s:.1f}",
            "" if method.variation is None else f"{method.variation:.2f}",
            exact_text(method.verdicts),
            "" if method.peak_bytes is None else f"{method.peak_bytes / 1e9:.2f} GB",
            "" if method.joules_per_token is None else f"{method.joules_per_token:.2f}",
            "" if method.price_per_million is None else f"{method.price_per_million:.2f}",
        )
    return without_empty_columns(table)


def category_table(setting: Setting, methods: list[MethodSummary]) -> Table:
    """Speedup and acceptance length of each category."""
    drafting = [method for method in methods if method.drafts]
    table = make_table(
        f"{setting}: speedup (acceptance length) by category", ("category",), [method.method for method in drafting]
    )
    for column in table.columns[1:]:  # a narrow terminal gets both figures, below each other
        column.no_wrap = False
    for name in dict.fromkeys(name for method in drafting for name in method.categories):
        cells = []
        for method in drafting:
            part = method.categories.get(name)
            accepts = "" if part is None or part.acceptance_length is None else f" ({part.acceptance_length:.2f})"
            cells.append("" if part is None else f"{times_text(part.speedup) or 'refused'}{accepts}")
        table.add_row(name, *cells)
    return table


def run_notes(summary: RunSummary) -> list[str]:
    """What tables cannot say."""
    notes = [f"Left out: {name}: {reason}." for name, reason in summary.left_out.items()]
    notes += [
        f"{method.method}, {method.setting}: no speedup is told, since {method.refusal}."
        for method in summary.methods
        if method.refusal
    ]
    graphs, seconds = summary.compiled
    notes += [f"{graphs} graphs were compiled in {seconds:.0f} s and kept."] if graphs else []
    waits = [(name, seconds) for (name, _), seconds in summary.warm_up_s.items() if name.endswith("compiled")]
    notes += [f"{name}: {seconds:.0f} s before its first text." for name, seconds in waits]
    notes += [
        f"{method.method}, {method.setting}: {served}."
        for method in summary.methods
        for served in sorted({call.served_by for call in method.calls if ":" in call.served_by})
        if not served.endswith(": asked for")  # the reason of generation/routing.py that is no surprise
    ]
    for method in summary.methods:
        if method.thinking.rounds:
            inside, outside = method.thinking.acceptance_length, method.answering.acceptance_length
            told = f"{inside:.2f} inside <think>, {'none' if outside is None else f'{outside:.2f}'} outside"
            notes.append(f"{method.method}, {method.setting}: acceptance length {told}.")
    return notes + ([f"{summary.cut}; figures are of what comes before."] if summary.cut else [])


def _compared_table(title: str, setting: Setting, compared: ComparedRuns) -> Table:
    table = make_table(title, ("method", "figure"), ("before", "after", "ratio", "95 %", "verdict"))
    styles = {"better": "green", "worse": "red"}
    for found in compared.differences:
        if found.setting == setting:
            table.add_row(
                found.method,
                found.what.removesuffix(" length"),
                f"{found.before:.2f}",
                f"{found.after:.2f}",
                f"{found.ratio:.3f}",
                f"{found.interval[0]:.2f}–{found.interval[1]:.2f}",
                Text(found.verdict, style=styles.get(found.verdict, "dim")),
            )
    return table


def compared_parts(compared: ComparedRuns, before: Records, after: Records) -> Iterator[Text | Table]:
    """One line per figure, and whether its difference is larger than the noise."""
    for setting in dict.fromkeys(found.setting for found in compared.differences):
        yield _compared_table(f"{before.name} → {after.name}: {setting}", setting, compared)
    yield Text(
        "A ratio whose 95 % interval holds 1 is within the noise of prompts and repeats; speedups of one code differ "
        f"by up to {PROCESSES_DIFFER:.0%} from process to process as well.",
        style="dim",
    )
    for records in (before, after):
        if records.cut_at:
            yield Text(f"{records.name} breaks off in line {records.cut_at} ({records.why_cut}).", style="dim")
    for line in compared.told:
        yield Text(f"The runs also differ in {line}.", style="dim")
