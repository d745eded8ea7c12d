"""Figures as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

REFUSED = "refused"
"""In place of a speedup that may not be told."""
_OF_HEADINGS = {"speedup": "bold", "ceiling": "bold", "round/bare": "bold"}
_OF_CELLS = {REFUSED: "bold red", "NO": "bold red", "yes": "green", "yes, up to ties": "green", "better": "green",
             "worse": "red", "noise": "dim"}  # fmt: skip


@dataclass(frozen=True)
class DataTable:
    """A caption, headings and rows; the first cell of a row is its heading."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def filled(self, blank: str = "") -> DataTable:
        """Without columns that no row has anything for; other empty cells are `blank`."""
        kept = [place for place in range(len(self.headings)) if any(row[place] for row in self.rows)]
        rows = tuple(tuple(row[place] or blank for place in kept) for row in self.rows)
        return DataTable(self.caption, tuple(self.headings[place] for place in kept), rows)

    def on_terminal(self, *, left: int = 1, wraps: bool = False) -> Table:
        """As rich draws it, the first `left` columns to the left; `wraps`: further ones may take several lines."""
        table = make_table(self.caption, self.headings[:left], self.headings[left:])
        for column in table.columns[left:]:
            column.no_wrap, column.style = not wraps, _OF_HEADINGS.get(str(column.header), "")
        for row in self.rows:
            table.add_row(*(Text(cell, style=_OF_CELLS.get(cell, "")) for cell in row))
        return table


def make_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}" if title else None, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    table.padding = (0, 1, 0, 0)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
