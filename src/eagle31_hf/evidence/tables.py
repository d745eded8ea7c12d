"""Figures as tables and lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def json_line(record: dict[str, Any]) -> str:
    """Everything in one line, the last one of a benchmark whose output is kept."""
    return json.dumps(record, default=str)


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
