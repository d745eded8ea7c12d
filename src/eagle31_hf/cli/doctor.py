"""`eagle31 doctor`: is this pair sound, does it pay, does it drift?"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..demo import PROMPTS as DEMO_PROMPTS
from ..drafter.drafter import Eagle31Drafter, MtpDrafter
from ..errors import ConfigurationError
from ..measure.doctor import PROMPTS, Examination, Finding, examine
from ..measure.drift import DriftCurve
from ..measure.origin import origin
from ..measure.plots import plot_drift
from ..measure.tables import figure_table, heading
from ..texts.prompts import read_prompts
from .options import JSON, MORE, NEW_TOKENS, command, make_console, option, writable_plot, write_json
from .pairs import PairSource, load_pair
from .progress import progress_bar

MINUTES = 2.0
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@command
def doctor(
    *,
    source: PairSource,
    prompts: str | None = option(None, "[NAME=]FILE or [NAME=]ORG/DATASET to examine with; default: of many kinds."),
    limit: int | None = option(
        None, "Most prompts; default: 20 of a file, spread over its rows, or all own ones.", min=1, panel=MORE
    ),
    new_tokens: int = option(48, "Longest answer.", *NEW_TOKENS, min=16, panel=MORE),
    thorough: bool = option(False, f"Write all texts, instead of what {MINUTES:g} minutes allow.", "--thorough"),
    drift: bool = option(False, "Also probe for attention drift.", "--drift"),
    plot: Path | None = option(
        None, "Write the drift plot to this PNG or SVG.", dir_okay=False, callback=writable_plot
    ),
    json_path: Path | None = JSON,
) -> None:
    """Examine a pair: does it fit, is the text exact, how much is accepted, is it set up right?"""
    console = make_console()
    # Of many kinds; before them the embedded target's own subjects, for it has little to say of others.
    own = [f"embedded={DEMO_PROMPTS}"] * (source.target is None) + [f"many={PROMPTS}"]
    # The prompts first: a wrong path should not cost loading a model.
    asked = read_prompts([prompts], limit or 20) if prompts else read_prompts(own)[:limit]
    pair = load_pair(source, needs_drafter=True)
    eagle = pair.drafter
    assert isinstance(eagle, Eagle31Drafter), "refused before anything was loaded"
    if isinstance(eagle, MtpDrafter) and (drift or plot is not None):
        raise ConfigurationError(
            "got --drift or --plot for a head inside a target, whose attention is not looked at; leave them out"
        )
    with progress_bar(console) as on_step:
        seen = examine(
            eagle,
            pair.tokenizer,
            pair.tasks(asked),
            new_tokens=new_tokens,
            drift=drift or plot is not None,
            minutes=None if thorough else MINUTES,
            on_step=on_step,
        )
    write_json(json_path, {**origin(eagle.binding), "target": pair.name, **seen.to_dict()})
    _show(console, seen)
    if plot is not None and seen.drift:
        plot_drift(seen.drift, plot)
        console.print(f"plot: {plot}")
    if seen.problems:
        raise typer.Exit(1)


def _show(console: Console, seen: Examination) -> None:
    console.print(_table(seen.findings))
    for curve in seen.drift:
        console.print(heading(f"drift, {curve.condition}"))
        console.print(_drift_table(curve))
    console.print(f"\nverdict: {seen.verdict}", style="bold")


def _table(findings: list[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("check", "", "what was seen"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        text = f"{finding.text}\n→ {finding.advice}" if finding.advice else finding.text
        table.add_row(finding.check, f"[{STYLES[finding.level]}]{finding.level}", text)
    return table


def _drift_table(curve: DriftCurve) -> Table:
    figures = {
        "looks at the prompt's start": curve.sink,
        "looks at the draft itself": curve.own,
        "length of the state fed back": curve.feedback_norm,
        "right, if all before were": curve.acceptance,
    }
    rows = tuple((name, *(f"{value:.2f}" for value in values)) for name, values in figures.items())
    headings = ("draft depth", *(str(depth + 1) for depth in range(len(curve.sink))))
    return figure_table(headings, rows)
