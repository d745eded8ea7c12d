"""`eagle31 bench`: what the loops are worth, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.text import Text
from torch import Tensor

from ..demo import CONVERSATIONS
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError
from ..generation_config import USUAL_TREE
from ..measure.loop_report import loop_parts
from ..measure.pair import measure_loops
from ..measure.provenance import describe_device
from ..measure.run_settings import RunSettings
from ..measure.synthetic import random_target, target_config
from ..target.precision import quick_dtype
from ..texts.prompts import read_prompts
from .bench_acceptance import acceptance as acceptance_command
from .bench_run import finish, list_of, run
from .option_groups import expand_options
from .options import JsonOption, TracebackOption, make_console, readable_errors
from .pairs import Drafting, PairSource, device_named, encode, load_pair
from .plan import print_decision
from .progress import progress_bar

app = typer.Typer(
    name="bench",
    help="Measure what the loops are worth, and what they cost.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(run)
app.command(name="acceptance")(acceptance_command)

SYNTHETIC_PROMPT_TOKENS = 128
DEFAULT_ACCEPTANCE = (0.8, 0.75, 0.7, 0.65, 0.6)


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
    batch: Annotated[
        str, typer.Option(callback=list_of(int, "positive whole numbers, e.g. 1,4,16", at_least=1), help="Batch sizes.")
    ] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved passes over the prompts.")] = 5,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted in a round; default: as the drafter decides.")
    ] = None,
    tree_width: Annotated[int, typer.Option(min=2, help="Children per draft token of the tree.")] = USUAL_TREE.top_k,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with the tree.")] = USUAL_TREE.nodes,
    compile_steps: Annotated[bool, typer.Option("--compile", help="Measure the accelerated loops, too.")] = False,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Random target instead: llama-8b, a config.json, or hidden=4096,layers=32,…"),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            callback=list_of(float, "probabilities, e.g. 0.8,0.7,0.6"),
            help="With --synthetic: chance of each draft position.",
        ),
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


class Subject(NamedTuple):
    """What is measured, and on what."""

    name: str
    drafter: Eagle31Drafter
    prompts: list[Tensor]


def _acceptance(synthetic: str | None, text: str | None) -> tuple[float, ...] | None:
    if synthetic is None:
        if text is not None:
            raise ConfigurationError("--acceptance is drawn on random targets only; pass --synthetic with it")
        return None
    return DEFAULT_ACCEPTANCE if text is None else tuple(float(part) for part in text.split(","))


def _refuse_with_synthetic(source: PairSource, prompts: str | None) -> None:
    usual = vars(PairSource(dtype=source.dtype, device=source.device, acceleration=source.acceleration))
    spare = ["--prompts"] if prompts is not None else []
    spare += [f"--{name.replace('_', '-')}" for name, value in vars(source).items() if value != usual[name]]
    if spare:
        raise ConfigurationError(f"--synthetic makes target, drafter and prompts; drop {', '.join(spare)}")


def _real(source: PairSource, prompts: str | None, limit: int, batch: int) -> Subject:
    # The prompts first: a wrong path should not cost loading a model.
    chats = CONVERSATIONS[:limit] if prompts is None else [one.opening for one in read_prompts([prompts], limit)]
    drafting = Drafting(schedule="constant")  # methods of one length: what is compared is the loop
    pair = load_pair(source, drafting, batch=batch, on_plan=lambda plan: print_decision(make_console(), plan))
    return Subject(pair.name, pair.eagle, [encode(pair, chat)["input_ids"][0] for chat in chats])


def _random(spec: str, limit: int, dtype: str, device: str, four_bit: bool) -> Subject:
    config = target_config(spec)
    precision = quick_dtype(torch.bfloat16, device) if dtype in ("auto", "stored") else getattr(torch, dtype)
    target = random_target(config, dtype=precision, device=device, four_bit=four_bit)
    drafter = Eagle31Drafter.from_target(target).eval()
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (limit, SYNTHETIC_PROMPT_TOKENS), generator=dice)
    name = f"random weights, {spec}{', 4 bit' if four_bit else ''}"
    return Subject(name, drafter, list(ids.to(drafter.binding.input_device)))


SETTINGS_TOLD = ("new_tokens", "batch_sizes", "repeats", "depth", "tree_width", "tree_size", "compiled", "acceptance")


def _run_loop(subject: Subject, settings: RunSettings, json_path: Path | None) -> None:
    out = make_console()
    with progress_bar(out) as advance:
        summary, records = measure_loops(subject.drafter, subject.prompts, settings, advance)
    binding = subject.drafter.binding
    machine = describe_device(binding.head_device, binding.model.dtype)
    told = {name: getattr(settings, name) for name in SETTINGS_TOLD}
    record = {"bench": "loop", "target": subject.name, **machine}
    record |= {"settings": {**told, "temperature": settings.temperatures[0], "warping": {}}}
    record |= {"prompts": len(subject.prompts), "records": [each.to_dict() for each in records]}
    out.print(conditions_text(subject.name, machine))
    for part in loop_parts(summary, records, synthetic=settings.acceptance is not None):
        out.print(part)
    finish(json_path, record | {"left_out": summary.left_out})


def conditions_text(name: str, machine: dict[str, Any]) -> Text:
    """What was measured where."""
    return Text(f"{name}, {machine['device']}, {machine['threads']} CPU threads, {machine['dtype']}", style="dim")
