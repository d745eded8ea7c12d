"""`eagle31 bench`: what a pair is worth on this machine, every text compared with plain `generate`'s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from ..errors import ConfigurationError, removal
from ..measure.bench import has_graphs
from ..measure.origin import origin
from ..measure.plots import plot_bench
from ..measure.results import BenchSettings, all_methods
from ..measure.tables import bench_parts, conditions_line
from ..texts.prompts import embedded_prompts, read_prompts
from .generate import measure_in_turns
from .options import JSON, MORE, NEW_TOKENS, command, make_console, option, writable_plot, write_json
from .pairs import DraftOptions, PairSource, load_pair


def _numbers(text: str) -> str:
    """The option's text, if it holds whole numbers from 1 on with commas between them."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise typer.BadParameter("wanted whole numbers, e.g. 1,8,32")
    return text


@command
def bench(
    *,
    source: PairSource,
    drafting: DraftOptions,
    prompts: list[str] | None = option(
        None, "[NAME=]FILE or [NAME=]DATASET, several times; default: the embedded ones."
    ),
    limit: int | None = option(None, "Most prompts of each, spread over its rows.", min=1),
    new_tokens: int = option(128, "Longest answer.", *NEW_TOKENS, min=3, panel=MORE),
    temperature: float = option(0.0, "0 is greedy.", min=0.0, max=5.0, panel=MORE),
    batch: str = option("1", "Rows written together, one or several numbers.", callback=_numbers, panel=MORE),
    repeats: int = option(3, "Passes over the prompts.", min=1, panel=MORE),
    minutes: float = option(3.0, "Most minutes, compiling and warming up aside; 0: until all is measured.", min=0.0),
    seed: int = option(0, "Of the first text; every other's follows from it.", min=0, panel=MORE),
    price_per_hour: float | None = option(None, "Of the machine, for the cost.", min=0.0, panel=MORE),
    plot: Path | None = option(
        None, "Draw speed by kind and acceptance by position here.", dir_okay=False, callback=writable_plot
    ),
    json_path: Path | None = JSON,
) -> None:
    """Measure what a pair is worth here: plain generate, our loop, lookups and the drafter in turns."""
    is_there = source.target is not None and Path(source.target).exists()
    if not is_there and (line := removal(f"bench {source.target}")):  # what were sub-commands
        raise ConfigurationError(line)
    # The prompts first: a wrong path should not cost loading a model.
    asked = read_prompts(prompts, limit) if prompts else embedded_prompts()[:limit]
    rows = tuple(int(part) for part in batch.split(","))
    console = make_console()
    loaded = load_pair(source, drafting, batch=max(rows))
    settings = BenchSettings(
        new_tokens=new_tokens, temperature=temperature, rows=rows, repeats=repeats, seed=seed, minutes=minutes or None
    )
    methods = all_methods(by_graphs=has_graphs(loaded.drafter, settings), with_drafter=source.has_drafter)
    result = measure_in_turns(console, loaded, loaded.tasks(asked), replace(settings, methods=methods))
    made_by = origin(loaded.drafter.binding)
    usual = "the target's own head" if source.target else "the embedded drafter"
    names = {"target": loaded.name, "drafter": source.drafter or usual}
    write_json(json_path, {**made_by, **names, **result.to_dict(price_per_hour)})  # before a picture can fail
    conditions = conditions_line(result, made_by)
    console.print(conditions)
    for part in bench_parts(result, price_per_hour):
        console.print(part)
    if plot is not None:
        target, by = (Path(name).name for name in names.values())  # of a folder or a Hub id
        plot_bench(result, plot, title=f"{target}, drafts by {by}", footer=conditions.plain)
        console.print(f"plot: {plot}")
    if not result.is_exact or result.interrupted:
        raise typer.Exit(130 if result.is_exact else 1)
