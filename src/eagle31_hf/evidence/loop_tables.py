"""Benchmark records as tables and lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .growth import GrowthRecord
from .memory_peaks import HIGHEST_RATIO, LOWEST_RATIO, PeakReport, PeakRun
from .records import LoopReport


def json_line(record: dict[str, Any]) -> str:
    """Everything in one line, the last one of a benchmark."""
    return json.dumps(record, default=str)


# --- bench loop -------------------------------------------------------------------------------------------------------


def ceiling_table(report: LoopReport) -> Table:
    """The speedup of loops that cost nothing, and the bare forwards it is made of."""
    headings = ("accepts", "plain", "verify (of)", "drafter steps", "ceiling")  # 80 columns are full
    table = make_table(
        "Theoretical ceiling, from bare forwards in ms (of so many tokens)", ("method", "batch"), headings
    )
    for record in report.records:
        bare, ceiling = record.bare, record.ceiling
        if bare is None or ceiling is None:
            continue
        table.add_row(
            record.name,
            str(record.batch_size),
            f"{record.acceptance_length:.2f}",
            _ms(record.plain_step_s),
            f"{_ms(bare.verify_s)} ({bare.verified_tokens:.3g})",
            f"{_ms(bare.absorb_s)} + {bare.further_steps:.3g} × {_ms(bare.drafter_step_s)}",
            Text(f"{ceiling:.2f}×", style="bold"),
        )
    return table


def loop_table(report: LoopReport) -> Table:
    """Every method to write at every batch size."""
    headings = ("tok/s", "speedup", "spread", "drafts", "ceiling", "accept", "same")
    table = make_table("Medians and spreads of interleaved repeats", ("method", "rows"), headings)
    last = None
    for record in report.records:
        if last not in (None, record.batch_size):
            table.add_section()
        last = record.batch_size
        speedups = record.speedups
        table.add_row(
            record.name,
            str(record.batch_size),
            f"{median(record.tok_per_s):.1f}",
            Text(f"{record.speedup:.2f}×", style="bold"),
            f"{min(speedups):.2f}–{max(speedups):.2f}",
            "" if record.by_drafter is None else f"{record.by_drafter:.2f}×",
            "" if record.ceiling is None else f"{record.speedup / record.ceiling:.0%}",
            f"{record.acceptance_length:.2f}",
            "" if record.equal_texts is None else f"{record.equal_texts}/{record.texts}",
        )
    return without_empty_columns(table)


def round_table(report: LoopReport) -> Table:
    """Where a round's time goes, and how much of it the bare forwards need."""
    headings = ("draft", "verify", "rest", "round", "bare", "round/bare")
    table = make_table("Where a round's ms go", ("method", "batch"), headings)
    for record in report.records:
        split, bare = record.split, record.bare
        if split is None or bare is None or record.round_over_bare is None:
            continue
        table.add_row(
            record.name,
            str(record.batch_size),
            _ms(split.draft_s),
            _ms(split.verify_s),
            _ms(split.other_s),
            _ms(split.total_s),
            _ms(bare.round_s),
            Text(f"{record.round_over_bare:.2f}", style="bold"),
        )
    return table


def loop_notes(report: LoopReport, *, synthetic: bool) -> list[Text]:
    """What the tables cannot say: what was left out and why, a loop that was not the one asked for."""
    notes = [f"Left out: {name}: {reason}." for name, reason in report.left_out.items()]
    notes += [
        f"{record.name}, batch {record.batch_size}, was served by {record.served_by}."
        for record in report.records
        if record.bare is not None and record.served_by not in ("", "own")
    ]
    if synthetic:
        notes.append("Random weights, and drafts accepted by lot: the figures are costs, the text means nothing.")
    elif any(record.equal_texts not in (None, record.texts) for record in report.records):
        notes.append("Texts that differ: in bf16 two tokens can tie; `eagle31 generate` tells ties from errors.")
    return [Text(note, style="dim") for note in notes]


# --- bench growth -----------------------------------------------------------------------------------------------------


def growth_table(records: Sequence[GrowthRecord]) -> Table:
    """Rounds after longer and longer contexts; growth is against the first."""
    headings = ("round", "attention", "other", "growth", "allocates, MB", "keeps, MB")
    table = make_table("A round after longer and longer contexts, in ms", ("context",), headings)
    for record in records:
        kept = Text(_mb(record.kept_bytes), style="" if record.allocates_steadily else "bold red")
        table.add_row(
            f"{record.context:,}",
            _ms(record.round_s),
            _ms(record.attention_s),
            _ms(record.other_s),
            f"{growth(records[0], record):+.0%}",
            _mb(record.round_bytes),
            kept,
        )
    return table


def growth(first: GrowthRecord, record: GrowthRecord) -> float:
    """By which share the part of a round that is not attention is longer than after the first context."""
    return record.other_s / first.other_s - 1


# --- bench memory -----------------------------------------------------------------------------------------------------

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
    lines = ["# Planned against measured memory", "", f"Output by `eagle31 bench memory`: {conditions}. In GB.", ""]
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


def make_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    table.padding = (0, 1, 0, 0)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def without_empty_columns(table: Table) -> Table:
    """The table without columns that no row has anything for."""
    kept, fresh = [column for column in table.columns if any(column.cells)], copy(table)
    fresh.columns, fresh.rows = [], []
    for column in kept:
        fresh.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for row, cells in zip(table.rows, zip(*(column.cells for column in kept), strict=True), strict=True):
        fresh.add_row(*cells, end_section=row.end_section)
    return fresh


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"
