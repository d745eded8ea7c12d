"""`eagle31 bench`: what the loops are worth, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text
from torch import Tensor

from ..demo import CONVERSATIONS
from ..drafter.drafter import Eagle31Drafter
from ..drafter.packed_linear import bitsandbytes
from ..errors import ConfigurationError
from ..evidence import tables
from ..evidence.bare import describe_device, describe_machine
from ..evidence.growth import CONTEXTS, check_growth, measure_growth, small_drafter
from ..evidence.loop_report import loop_parts
from ..evidence.memory_peaks import RUNS, measure_peaks, runs_on
from ..evidence.pair import measure_loops
from ..evidence.run_settings import RunSettings
from ..evidence.synthetic import random_target, target_config
from ..generation_config import FIXED_DEPTH
from ..target.precision import quick_dtype
from ..texts.prompts import read_prompts
from ..trees.shape import DraftShape
from .bench_acceptance import acceptance as acceptance_command
from .bench_run import run
from .measuring import DeviceOption, DTypeOption, finish, progress_bar
from .option_groups import expand_options
from .options import JsonOption, TracebackOption, make_console, readable_errors, writable_json
from .pairs import Drafting, PairSource, device_named, encode, load_pair
from .plan import print_decision

app = typer.Typer(name="bench", help="Measure what the loops are worth, and what they cost.", no_args_is_help=True)
app.command()(run)
app.command(name="acceptance")(acceptance_command)

SYNTHETIC_PROMPT_TOKENS = 128
DEFAULT_ACCEPTANCE = (0.8, 0.75, 0.7, 0.65, 0.6)


def _whole_numbers(text: str) -> str:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"got {text!r}; wanted positive whole numbers, e.g. 1,4,16")
    return text


def _numbers(text: str | None) -> str | None:
    try:
        [float(part) for part in (text or "0").split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"got {text!r}; wanted probabilities, e.g. 0.8,0.7,0.6") from error
    return text


@app.command()
@expand_options
@readable_errors
def loop(
    *,
    source: PairSource,
    prompts: Annotated[
        str | None, typer.Option(help="[NAME=]FILE or [NAME=]ORG/DATASET, chats cut short; default: the embedded ones.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts to take, spread over the rows.")] = 40,
    new_tokens: Annotated[int, typer.Option(min=3, help="Tokens written to each prompt, no more and no fewer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    batch: Annotated[str, typer.Option(callback=_whole_numbers, help="Batch sizes.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved passes over the prompts.")] = 5,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in a round; default: as the drafter decides.")
    ] = None,
    tree_width: Annotated[int, typer.Option(min=2, help="Children per draft token of the tree.")] = 4,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with the tree.")] = 24,
    compile_steps: Annotated[bool, typer.Option("--compile", help="Measure the accelerated loops, too.")] = False,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Random target instead: llama-8b, a config.json, or hidden=4096,layers=32,…"),
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(callback=_numbers, help="With --synthetic: chance of each draft position.")
    ] = None,
    four_bit: Annotated[bool, typer.Option("--four-bit", help="With --synthetic: NF4 weights.")] = False,
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Plain generate, transformers' alternatives and our loops on the same prompts, in turns."""
    settings = RunSettings(
        new_tokens=new_tokens,
        temperatures=(temperature,),
        batch_sizes=tuple(int(part) for part in batch.split(",")),
        repeats=repeats,
        depth=draft_tokens,
        tree_width=tree_width,
        tree_size=tree_size,
        compiled=compile_steps or source.acceleration == "compile",
        acceptance=_acceptance(synthetic, acceptance),
        ignore_eos=True,
        as_configured=True,
        ceilings=True,
    )
    settings.check()
    if synthetic is None:
        if four_bit:
            raise ConfigurationError("--four-bit is for random targets; pass --quantization 4bit for others")
        subject = _real(source, prompts, limit, max(settings.batch_sizes))
    else:
        _refuse_with_synthetic(source, prompts)
        subject = _random(synthetic, limit, source.torch_dtype, device_named(source.device), four_bit)
    _run_loop(subject, settings, json_path)


class Subject:
    """What is measured, and on what."""

    def __init__(self, name: str, drafter: Eagle31Drafter, prompts: list[Tensor]):
        self.name, self.drafter, self.prompts = name, drafter, prompts


def _acceptance(synthetic: str | None, text: str | None) -> tuple[float, ...] | None:
    if synthetic is None:
        if text is not None:
            raise ConfigurationError("--acceptance is drawn on random targets only; pass --synthetic with it")
        return None
    return DEFAULT_ACCEPTANCE if text is None else tuple(float(part) for part in text.split(","))


def _refuse_with_synthetic(source: PairSource, prompts: str | None) -> None:
    told = {"prompts": prompts, **vars(source)}
    usual = {
        "prompts": None,
        **vars(PairSource(dtype=source.dtype, device=source.device, acceleration=source.acceleration)),
    }
    spare = [f"--{name.replace('_', '-')}" for name, value in told.items() if value != usual[name]]
    if spare:
        raise ConfigurationError(f"--synthetic makes target, drafter and prompts; drop {', '.join(spare)}")


def _real(source: PairSource, prompts: str | None, limit: int, batch: int) -> Subject:
    # The prompts first: a wrong path should not cost loading a model.
    chats = CONVERSATIONS[:limit] if prompts is None else [one.opening for one in read_prompts([prompts], limit)]
    drafting = Drafting(schedule="constant")  # methods of one length: what is compared is the loop
    pair = load_pair(source, drafting, batch=batch, on_plan=lambda plan: print_decision(make_console(), plan))
    return Subject(pair.name, pair.drafter, [encode(pair, chat)["input_ids"][0] for chat in chats])


def _random(spec: str, limit: int, dtype: str, device: str, four_bit: bool) -> Subject:
    config = target_config(spec)
    precision = quick_dtype(torch.bfloat16, device) if dtype in ("auto", "stored") else getattr(torch, dtype)
    target = random_target(config, dtype=precision, device=device, four_bit=four_bit)
    drafter = Eagle31Drafter.from_target(target).eval()
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (limit, SYNTHETIC_PROMPT_TOKENS), generator=dice)
    name = f"random weights, {spec}{', 4 bit' if four_bit else ''}"
    return Subject(name, drafter, list(ids.to(drafter.require_binding().input_device)))


SETTINGS_TOLD = ("new_tokens", "batch_sizes", "repeats", "depth", "tree_width", "tree_size", "compiled", "acceptance")


def _run_loop(subject: Subject, settings: RunSettings, json_path: Path | None) -> None:
    out = make_console()
    with progress_bar(out) as (progress, task):

        def show(done: float) -> None:
            progress.update(task, completed=done)
            progress.refresh()

        summary, records = measure_loops(subject.drafter, subject.prompts, settings, show)
    machine = describe_machine(subject.drafter.require_binding())
    told = {name: getattr(settings, name) for name in SETTINGS_TOLD}
    record = {"bench": "loop", "target": subject.name, **machine}
    record |= {"settings": {**told, "temperature": settings.temperatures[0], "warping": {}}}
    record |= {"prompts": len(subject.prompts), "records": [each.to_dict() for each in records]}
    out.print(_conditions(subject.name, machine))
    for part in loop_parts(summary, records, synthetic=settings.acceptance is not None):
        out.print(part)
    finish(json_path, record | {"left_out": summary.left_out})


@app.command()
@readable_errors
def growth(
    *,
    contexts: Annotated[str, typer.Option(callback=_whole_numbers, help="Lengths of context.")] = ",".join(
        map(str, CONTEXTS)
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds timed after each context.")] = 30,
    tree_width: Annotated[int, typer.Option(min=1, help="Children per draft token; 1 drafts a chain.")] = 1,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with a tree.")] = 24,
    dtype: DTypeOption = "fp32",
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """What of a round grows with the context, and what it allocates, on a small random target."""
    lengths = [int(part) for part in contexts.split(",")]
    check_growth(lengths, rounds)
    drafter = small_drafter(torch.float32 if dtype == "auto" else getattr(torch, dtype), device_named(device))
    size = tree_size if tree_width > 1 else 0
    shape = DraftShape(depth=FIXED_DEPTH, top_k=tree_width, size=size)
    out = make_console()
    with progress_bar(out) as (progress, task):

        def show() -> None:
            progress.advance(task, 1 / len(lengths))
            progress.refresh()

        records = measure_growth(drafter, shape, lengths, rounds=rounds, on_context=show)
    machine = describe_machine(drafter.require_binding())
    out.print(_conditions("small random target", machine))
    out.print(tables.growth_table(records))
    rows = [{**each.to_dict(), "growth": tables.growth(records[0], each)} for each in records]
    finish(json_path, {"bench": "growth", **machine, "tree_width": tree_width, "records": rows})


@app.command()
@readable_errors
def memory(
    *,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Another random target in every run: a known name, a config.json, or hidden=512,layers=4,…"),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="With --synthetic: tokens of the longest row.")] = 2048,
    out_path: Annotated[
        Path | None,
        typer.Option("--out", dir_okay=False, callback=writable_json, help="Also write the table as a Markdown page."),
    ] = None,
    dtype: DTypeOption = "bf16",
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """What plans say of runs against what the runs take, on random targets of 8 and 70 billion parameters."""
    place = torch.device(device_named(device))
    if synthetic is None and place.type != "cuda":
        raise ConfigurationError(
            f"targets of 8 and 70 billion parameters are for a CUDA card, and this is a {place.type}; pass --synthetic "
            "with a small target, e.g. hidden=512,layers=4"
        )
    precision = torch.bfloat16 if dtype in ("auto", "stored") else getattr(torch, dtype)
    runs = RUNS if synthetic is None else runs_on(synthetic, context)
    out = make_console()
    with progress_bar(out) as (progress, task):

        def show() -> None:
            progress.advance(task, 1 / len(runs))
            progress.refresh()

        measured = measure_peaks(runs, dtype=precision, device=place, on_run=show)
    machine = {**describe_device(place, precision), "bitsandbytes": bitsandbytes().__version__}
    out.print(_conditions("random weights" if synthetic is None else f"random weights, {synthetic}", machine))
    out.print(tables.memory_table(measured))
    for note in tables.memory_notes(measured):
        out.print(Text(note, style="dim"))
    if out_path is not None:
        out_path.write_text(tables.memory_markdown(measured, machine), encoding="utf-8")
    finish(json_path, {"bench": "memory", **machine, **measured.to_dict()})


def _conditions(name: str, machine: dict[str, Any]) -> Text:
    return Text(f"{name}, {machine['device']}, {machine['threads']} CPU threads, {machine['dtype']}", style="dim")
