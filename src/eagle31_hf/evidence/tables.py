"""Figures as tables and lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .growth import GrowthRecord
from .memory_peaks import HIGHEST_RATIO, LOWEST_RATIO, PeakReport, PeakRun


def json_line(record: dict[str, Any]) -> str:
    """Everything in one line, the last one of a benchmark."""
    return json.dumps(record, default=str)


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
