"""What a plan says of a run, against what the run takes.

    python memory_peaks.py --out memory.md                                  # 8B and 70B targets, on a CUDA card
    python memory_peaks.py --synthetic hidden=512,layers=4 --context 2048   # the same way on a CPU

Each run is planned from the target's configuration alone. Then target and drafter are made with random weights, the
drafter is loaded under that very plan, a prompt is read and a few rounds are written, and the peak is measured: on CUDA
by asking the allocator, elsewhere by counting storages, which does not see workspaces inside kernels.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.table import Table
from rich.text import Text
from storages import StorageCounter
from torch import nn
from transformers import PreTrainedModel

from eagle31_hf.cli.bench import conditions_text
from eagle31_hf.cli.bench_run import finish
from eagle31_hf.cli.options import JsonOption, TracebackOption, make_console, readable_errors, writable_json
from eagle31_hf.cli.pairs import DeviceName, DTypeName, device_named
from eagle31_hf.cli.progress import progress_bar
from eagle31_hf.decoding.memory_ladder import is_out_of_memory
from eagle31_hf.drafter.default_config import default_config
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafter.packed_linear import bitsandbytes
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.measure.methods import Prompts, left_padded, requested_shape
from eagle31_hf.measure.provenance import describe_device, software
from eagle31_hf.measure.synthetic import SyntheticRequest, random_target, target_config, write_synthetic
from eagle31_hf.measure.tables import make_table
from eagle31_hf.memory import MemoryPlan, plan_memory
from eagle31_hf.memory.cards import GIB, Card, measure_card
from eagle31_hf.memory.drafter_facts import USUAL_DRAFT_VOCABULARY
from eagle31_hf.memory.ledger import RUNNING
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.weight_bytes import storage_bytes
from eagle31_hf.target.precision import SHORT_NAMES

NEW_TOKENS, SHORTEST_PROMPT = 32, 4
ACCEPTANCE = (0.8,)
LOWEST_RATIO, HIGHEST_RATIO = 0.99, 1.03
"""A plan is kept if it is never more than 1 % below the measured peak, and no more than 3 % above it."""


@dataclass(frozen=True)
class PeakRun:
    """One combination to plan and to run.

    Attributes:
        target: what `target_config` takes.
        four_bit: the target's linear layers as NF4 with double quantisation.
        context: tokens of the longest row, prompt and 32 new ones.
        tree_size: nodes per round; `None` for a chain.
        prefill_chunk: prompt tokens per forward; `None` for the whole prompt at once.
        cache_type, drafter_precision: as in `plan_memory`.
    """

    target: str
    four_bit: bool = False
    context: int = 8192
    batch: int = 1
    draft_tokens: int = 6
    tree_size: int | None = None
    prefill_chunk: int | None = 1024
    cache_type: str = "full"
    drafter_precision: str = "full"

    @property
    def prompt_tokens(self) -> int:
        return self.context - NEW_TOKENS

    def to_plan(self, dtype: torch.dtype, card: Card) -> MemoryPlan:
        """The plan of this run, and of no other: nothing is left for the planner to choose."""
        if self.prompt_tokens < SHORTEST_PROMPT:
            raise ConfigurationError(
                f"got a context of {self.context} tokens; wanted at least {NEW_TOKENS + SHORTEST_PROMPT}, of which "
                f"{NEW_TOKENS} are written"
            )
        plain = DTYPE_NAMES[dtype]
        return plan_memory(
            target_config(self.target),
            quantization=replace(SCHEMES["bnb-nf4-dq"], dtype=plain) if self.four_bit else plain,
            card=card,
            context=self.context,
            batch=self.batch,
            draft_tokens=self.draft_tokens,
            tree_size=self.tree_size,
            prefill_chunk=self.prefill_chunk or self.prompt_tokens,
            cache_type=self.cache_type,
            drafter_precision=self.drafter_precision,
        )


DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

RUNS = (
    PeakRun("llama 3.1 8b", four_bit=True),
    PeakRun("llama 3.1 8b", four_bit=True, context=32768, cache_type="int8"),
    PeakRun("llama 3.1 8b", four_bit=True, tree_size=60, prefill_chunk=None),
    PeakRun("llama 3.1 8b", four_bit=True, context=4096, batch=4, draft_tokens=3, drafter_precision="nf4"),
    PeakRun("llama 3.1 8b", context=4096, prefill_chunk=None),
    PeakRun("llama 3.1 8b", context=32768, drafter_precision="int8"),
    PeakRun("llama 3.1 8b", context=4096, batch=4, tree_size=24, prefill_chunk=512, cache_type="int8"),
    PeakRun("qwen3 8b", four_bit=True, context=16384, prefill_chunk=2048),
    PeakRun("llama 3.1 70b", four_bit=True, context=4096, prefill_chunk=512),
    PeakRun("llama 3.1 70b", four_bit=True, tree_size=60, cache_type="int8", drafter_precision="nf4"),
)
"""Chains and trees, prompts in chunks and at once, one row and four, both caches, every drafter precision."""


def runs_on(target: str, context: int) -> tuple[PeakRun, ...]:
    """`RUNS` on another target, at one context and with two chunks to a prompt: every distinct combination."""
    chunk = max(1, (context - NEW_TOKENS) // 2)
    runs = (replace(run, target=target, context=context, prefill_chunk=run.prefill_chunk and chunk) for run in RUNS)
    return tuple(dict.fromkeys(runs))


@dataclass(frozen=True)
class PeakRecord:
    """Planned and measured bytes of one run, the runtime's own left out.

    Attributes:
        planned_bytes: the plan's peak once weights are loaded, at `planned_moment`.
        measured_bytes: most bytes alive at once, weights included.
        planned_weights, measured_weights: of target and drafter.
    """

    run: PeakRun
    planned_bytes: int
    planned_moment: str
    measured_bytes: int
    planned_weights: int
    measured_weights: int

    @property
    def ratio(self) -> float:
        """Planned over measured peak."""
        return self.planned_bytes / self.measured_bytes

    @property
    def is_kept(self) -> bool:
        return LOWEST_RATIO <= self.ratio <= HIGHEST_RATIO

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "is_kept": self.is_kept}


@dataclass(frozen=True)
class PeakReport:
    """What was measured, and what was not with the reason."""

    records: tuple[PeakRecord, ...]
    left_out: tuple[tuple[PeakRun, str], ...]

    def to_dict(self) -> dict[str, Any]:
        left_out = [{**asdict(run), "reason": reason} for run, reason in self.left_out]
        return {"records": [record.to_dict() for record in self.records], "left_out": left_out}


def measure_peaks(
    runs: Iterable[PeakRun], *, dtype: torch.dtype, device: torch.device, on_run: Callable[[], None] = lambda: None
) -> PeakReport:
    """Plan and run every combination that the plan says fits on `device` as it is now."""
    records, left_out = [], []
    for run in runs:
        found = _measured_or_left_out(run, dtype, device)
        if isinstance(found, PeakRecord):
            records.append(found)
        else:
            left_out.append((run, found))
        on_run()
    return PeakReport(tuple(records), tuple(left_out))


def _measured_or_left_out(run: PeakRun, dtype: torch.dtype, device: torch.device) -> PeakRecord | str:
    plan = run.to_plan(dtype, measure_card(device))
    if not plan.fits:
        return f"needs {plan.peak_bytes / GIB:.1f} GiB, {plan.card.name} has {plan.budget_bytes / GIB:.1f} GiB free"
    try:
        return measure_peak(run, plan, dtype=dtype, device=device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"ran out of memory, planned were {plan.peak_bytes / GIB:.1f} GiB"


def measure_peak(run: PeakRun, plan: MemoryPlan, *, dtype: torch.dtype, device: torch.device) -> PeakRecord:
    """Run one combination under its plan."""
    meter: Meter = AllocatorMeter(device) if device.type == "cuda" else StorageMeter()
    target = random_target(target_config(run.target), dtype=dtype, device=device, four_bit=run.four_bit)
    meter.loaded(target)
    drafter = planned_drafter(target, plan)
    meter.loaded(drafter)
    prompts = ragged_prompts(run, target)
    request = SyntheticRequest(
        NEW_TOKENS,
        requested_shape(drafter, batch_size=run.batch),
        ACCEPTANCE,
        prefill_chunk=drafter.generation_config.prefill_chunk_size,
    )
    peak = meter.peak(lambda: write_synthetic(drafter, prompts, request))
    drafter.detach()
    moment = max(RUNNING, key=plan.bytes_by_moment.__getitem__)
    return PeakRecord(
        run=run,
        planned_bytes=plan.bytes_by_moment[moment] - plan.card.context_bytes,
        planned_moment=moment,
        measured_bytes=peak,
        planned_weights=planned_weights(plan),
        measured_weights=meter.weights,
    )


def planned_weights(plan: MemoryPlan) -> int:
    """Bytes of target and drafter: what is alive from loading to the end."""
    packing_up = ("runtime", "one tensor before packing")
    terms = (term for term in plan.ledger if "load" in term.moments)
    return sum(term.num_bytes for term in terms if term.name not in packing_up)


def planned_drafter(target: PreTrainedModel, plan: MemoryPlan) -> Eagle31Drafter:
    """A random drafter of the planned shape, loaded from a folder as a user's would be, under the plan."""
    vocabulary = min(target.config.get_text_config().vocab_size, USUAL_DRAFT_VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        made = Eagle31Drafter(default_config(target, draft_vocab_size=vocabulary))
        made.to(dtype=target.dtype).save_pretrained(folder)  # type: ignore[call-arg]
        del made
        return Eagle31Drafter.from_pretrained(folder, target=target, memory=plan)


def ragged_prompts(run: PeakRun, target: PreTrainedModel) -> Prompts:
    """Random ids. All rows but the first are half as long: rows of unlike length need a mask each, as is planned."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.get_text_config().vocab_size, (run.prompt_tokens,), generator=dice)
    ids = ids.to(target.device)
    return left_padded([ids, *[ids[len(ids) // 2 :]] * (run.batch - 1)], 0)


# --- meters -----------------------------------------------------------------------------------------------------------


class Meter(Protocol):
    """Bytes taken since it was made: `weights` of what has been loaded, and the peak of a call above that."""

    weights: int

    def loaded(self, model: nn.Module) -> None:
        """Count a model that is there now, before anything runs on it: bitsandbytes may repack it for a CPU then."""

    def peak(self, call: Callable[[], object]) -> int:
        """Most bytes alive during `call`, weights included."""


class AllocatorMeter:
    """Asks the CUDA allocator, which tells what it handed out, workspaces inside kernels included."""

    def __init__(self, device: torch.device):
        self.device, self.weights = device, 0
        gc.collect()  # what the last run left behind must not be given back during this one
        self._before = torch.cuda.memory_allocated(device)

    def loaded(self, model: nn.Module) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        self.weights = torch.cuda.memory_allocated(self.device) - self._before

    def peak(self, call: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._before


class StorageMeter:
    """Walks the models' storages and counts those that a computation makes."""

    def __init__(self) -> None:
        self.weights = 0

    def loaded(self, model: nn.Module) -> None:
        self.weights += storage_bytes(model)

    def peak(self, call: Callable[[], object]) -> int:
        with StorageCounter() as counter:
            call()
        return self.weights + counter.peak_bytes


# --- telling ---

RUN_COLUMNS = ("target", "draft", "size/chunk", "stored")


def memory_table(measured: PeakReport) -> Table:
    """Planned and measured peak of every run; a ratio outside the promise is red."""
    table = make_table("Peaks in GB, and planned over measured", RUN_COLUMNS, ("planned", "taken", "ratio"))
    for record in measured.records:
        ratio = Text(f"{record.ratio:.3f}", style="bold" if record.is_kept else "bold red")
        table.add_row(*_run_cells(record.run), _gb(record.planned_bytes), _gb(record.measured_bytes), ratio)
    return table


def memory_notes(measured: PeakReport) -> list[str]:
    """What was left out and why, how far planned weights are off, and how many plans were kept."""
    notes = [f"Left out: {', '.join(_run_cells(run))}: {reason}." for run, reason in measured.left_out]
    if measured.records:
        off = max(abs(record.planned_weights - record.measured_weights) for record in measured.records)
        kept = sum(record.is_kept for record in measured.records)
        notes.append(f"Planned weights are off by {off:,} bytes at most.")
        notes.append(f"{kept} of {len(measured.records)} ratios lie within {LOWEST_RATIO} to {HIGHEST_RATIO}.")
    return notes


def memory_markdown(measured: PeakReport, machine: Mapping[str, Any]) -> str:
    """The same as a page, with the weights."""
    columns = (*RUN_COLUMNS, "weights planned", "measured", "peak planned", "measured", "ratio")
    conditions = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        "# Planned against measured memory",
        "",
        f"Output by `examples/studies/memory_peaks.py`: {conditions}. In GB.",
        "",
    ]
    lines += ["| " + " | ".join(columns) + " |", "|---|---|---|---|---:|---:|---:|---:|---:|"]
    for record in measured.records:
        sizes = (record.planned_weights, record.measured_weights, record.planned_bytes, record.measured_bytes)
        cells = (*_run_cells(record.run), *map(_gb, sizes), f"{record.ratio:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in memory_notes(measured)), ""])


def _run_cells(run: PeakRun) -> tuple[str, ...]:
    """As `RUN_COLUMNS`: size is rows × tokens, stored are the cache and the drafter's matrices."""
    name = "sizes given" if "=" in run.target else run.target
    draft = f"chain {run.draft_tokens}" if run.tree_size is None else f"tree {run.tree_size}"
    size = f"{run.batch}×{run.context}/{run.prefill_chunk or 'all'}"
    return f"{name}{' nf4' if run.four_bit else ''}", draft, size, f"{run.cache_type}, {run.drafter_precision}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}"


@readable_errors
def main(
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
    dtype: Annotated[DTypeName, typer.Option(help="Precision.")] = "bf16",
    device: Annotated[DeviceName, typer.Option(help="Where to run.")] = "auto",
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
    precision = torch.bfloat16 if dtype in ("auto", "stored") else getattr(torch, SHORT_NAMES.get(dtype, dtype))
    runs = RUNS if synthetic is None else runs_on(synthetic, context)
    out = make_console()
    with progress_bar(out) as advance:
        measured = measure_peaks(runs, dtype=precision, device=place, on_run=lambda: advance(1 / len(runs)))
    versions = {name: software()[name] for name in ("torch", "transformers", "python")}
    machine = {**describe_device(place, precision), **versions, "bitsandbytes": bitsandbytes().__version__}
    out.print(conditions_text("random weights" if synthetic is None else f"random weights, {synthetic}", machine))
    out.print(memory_table(measured))
    for note in memory_notes(measured):
        out.print(Text(note, style="dim"))
    if out_path is not None:
        out_path.write_text(memory_markdown(measured, machine), encoding="utf-8")
    finish(json_path, {"bench": "memory", **machine, **measured.to_dict()})


if __name__ == "__main__":
    typer.run(main)
