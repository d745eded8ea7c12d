"""`eagle31 bench acceptance`: drafters against each other on the same texts of one target."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..drafter.drafter import Eagle31Drafter
from ..measure.known_texts import DrafterAcceptance, acceptance_of
from ..measure.tables import DataTable
from ..texts.prompts import embedded_prompts, read_prompts
from ..training.distillation.evaluation import EvaluationPrompt
from ..training.distillation.known_texts import KnownTexts, TextRounds, rounds_of, write_texts
from ..trees.shape import DraftShape
from .bench_run import finish, list_of
from .options import JsonOption, TracebackOption, make_console, readable_errors
from .pairs import DeviceName, DTypeName, PairSource, encode, load_pair
from .progress import progress_bar


@readable_errors
def acceptance(
    *,
    drafters: Annotated[list[str], typer.Argument(help="Folders or Hub ids; the others are compared with the first.")],
    target: Annotated[str | None, typer.Option(help="Folder, Hub id or .gguf file; default: the embedded one.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]FILE or [NAME=]ORG/DATASET, several times; default: the embedded ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each, spread over its rows.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens the target writes to each prompt.")] = 128,
    temperature: Annotated[
        str, typer.Option(callback=list_of(float, "temperatures, e.g. 0,1"), help="One or several; 0 is greedy.")
    ] = "0,1",
    draft_tokens: Annotated[
        str, typer.Option(callback=list_of(int, "whole numbers, e.g. 5,8", at_least=1), help="Lengths of chains.")
    ] = "5,8",
    tree_width: Annotated[int, typer.Option(min=1, help="Children per draft token; 1 drafts a chain.")] = 1,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with a tree.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Of the texts that are drawn.")] = 0,
    dtype: Annotated[DTypeName, typer.Option(help="Precision; auto is what is quick here.")] = "auto",
    device: Annotated[DeviceName, typer.Option(help="Where to run.")] = "auto",
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Acceptance of drafters on the same texts, exactly: no draft is drawn, and the target writes each text once."""
    asked = read_prompts(prompts, limit) if prompts else embedded_prompts()[:limit]
    pair = load_pair(PairSource(target, drafters[0], dtype, device))
    loaded = [pair.eagle, *(Eagle31Drafter.from_pretrained(name, target=pair.target) for name in drafters[1:])]
    layers = {layer for drafter in loaded for layer in drafter.binding.aux_layers}
    openings = [EvaluationPrompt(encode(pair, p.opening)["input_ids"][0].tolist(), p.category) for p in asked]
    console = make_console()
    found: list[DrafterAcceptance] = []
    for served_at in map(float, temperature.split(",")):
        with progress_bar(console) as advance:
            texts = write_texts(
                pair.eagle.binding, openings, served_at, max_new_tokens=new_tokens, layers=layers, seed=seed,
                on_prompts=lambda count: advance(count / len(openings)),
            )  # fmt: skip
        for depth in map(int, draft_tokens.split(",")):
            shape = DraftShape(depth, top_k=tree_width, size=tree_size if tree_width > 1 else 0)
            measured = _compare(drafters, loaded, texts, shape)
            console.print(_table(measured))
            found += measured
    record = {"bench": "acceptance", "target": pair.name, "prompts": len(openings), "new_tokens": new_tokens}
    finish(json_path, {**record, "seed": seed, "drafters": [asdict(each) for each in found]})


def _compare(
    names: list[str], drafters: list[Eagle31Drafter], texts: KnownTexts, shape: DraftShape
) -> list[DrafterAcceptance]:
    first: list[TextRounds] | None = None
    found = []
    for name, drafter in zip(names, drafters, strict=True):
        started = time.perf_counter()
        rounds = rounds_of(drafter, texts, shape)
        seconds = time.perf_counter() - started
        found.append(acceptance_of(name, texts.temperature, shape, rounds, first, seconds))
        first = first or rounds
    return found


def _table(found: list[DrafterAcceptance]) -> Table:
    """Of one setting."""
    drafts = "chains of" if found[0].tree_width == 1 else f"trees of {found[0].tree_size} tokens, depth"
    title = f"temperature {found[0].temperature:g}, {drafts} {found[0].draft_tokens}"
    rows = tuple(
        (each.name, f"{each.length:.3f}", _span(each.interval), "" if each.ratio is None else f"{each.ratio:.3f}×",
         _span(each.ratio_interval))
        for each in found
    )  # fmt: skip
    return DataTable(title, ("drafter", "accepted", "95 %", "to the first", "95 %"), rows).on_terminal()


def _span(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.3f}–{interval[1]:.3f}"
