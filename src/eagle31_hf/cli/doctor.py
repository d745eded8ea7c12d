"""`eagle31 doctor`: is this pair sound, does it pay, does it drift?"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from ..demo import PROMPTS as DEMO_PROMPTS
from ..drafter.drafter import Eagle31Drafter, MtpDrafter
from ..errors import ConfigurationError
from ..measure.doctor import PROMPTS, examine
from ..measure.drift import DriftCurve
from ..measure.origin import origin
from ..measure.plots import plot_drift
from ..measure.tables import figure_table, heading
from ..texts.prompts import read_prompts
from .options import JSON, MORE, NEW_TOKENS, command, make_console, option, plain_table, writable_plot, write_json
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
    rows = (
        (each.check, f"[{STYLES[each.level]}]{each.level}", "\n→ ".join(filter(None, (each.text, each.advice))))
        for each in seen.findings
    )
    console.print(plain_table(rows, "check", "", "what was seen"))
    for curve in seen.drift:
        console.print(heading(f"drift, {curve.condition}"))
        console.print(_drift_table(curve))
    console.print(f"\nverdict: {seen.verdict}", style="bold")
    if plot is not None and seen.drift:
        plot_drift(seen.drift, plot)
        console.print(f"plot: {plot}")
    if seen.problems:
        raise typer.Exit(1)


def _drift_table(curve: DriftCurve) -> Table:
    figures = {
        "looks at the prompt's start": curve.sink,
        "looks at the draft itself": curve.own,
        "length of the state fed back": curve.feedback_norm,
        "right, if all before were": curve.acceptance,
    }
    return figure_table(
        [
            {"draft depth": name, **{str(depth): f"{value:.2f}" for depth, value in enumerate(values, 1)}}
            for name, values in figures.items()
        ]
    )
