"""Figures of README's and other pages' tables, held against the records they come from.

docs/figures.toml says for each page which of its numbers stands in which record:

    [["README.md"]]
    line = "| prompt lookup | {}× | {}× |"
    from = ["demo-greedy.json methods[3].speedup.median", "…"]

`line` is a row of a table or a piece of a line of the page, `{}` a number in it; one that stands on a page more than
once has an entry for each time, in their order. `python docs/figures.py` (`make figures`) writes the records' values
into the pages, with as many digits as stand there; the tests only look.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records"
STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?"
SCALES = {"%": 100.0, "ms": 1e3, "µs": 1e6}


class FigureError(ValueError):
    """A figure that cannot be looked up."""


@dataclass(frozen=True)
class Entry:
    """A piece of a page's line with `{}` for numbers, and for each number `RECORD PLACE`."""

    line: str
    sources: tuple[str, ...]

    def found_in(self, text: str) -> list[re.Match[str]]:
        pattern = f"({NUMBER})".join(map(re.escape, self.line.split("{}")))
        is_row = self.line.startswith("| ") and self.line.endswith(" |")
        return list(re.finditer(f"^{pattern}$" if is_row else pattern, text, re.M))


@dataclass(frozen=True)
class Figure:
    """A number on a page with its record: where it stands, what follows it there, and `RECORD PLACE`."""

    shown: str
    span: tuple[int, int]
    followed_by: str
    source: str
    records: Path = RECORDS

    def as_recorded(self) -> str:
        """The record's value in the unit that is shown, rounded to the digits that stand on the page."""
        digits = len(self.shown.partition(".")[2])
        sign = "+" if self.shown[0] in "+−" else ""
        return f"{self.value():{sign},.{digits}f}".replace("-", "−")

    def value(self) -> float:
        """What the record says, in the unit that is shown."""
        name, _, place = self.source.partition(" ")
        unit = self.followed_by.lstrip()
        scale = next((by for short, by in SCALES.items() if re.match(rf"{short}(?!\w)", unit)), 1.0)
        try:
            return float(look_up(json.loads((self.records / name).read_text(encoding="utf-8")), place)) * scale
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise FigureError(f"{self.shown} is not at {place} of {name}") from error


def all_entries() -> dict[Path, list[Entry]]:
    """What docs/figures.toml says, by page."""
    pages = tomllib.loads((ROOT / "docs" / "figures.toml").read_text(encoding="utf-8"))
    return {ROOT / page: [Entry(row["line"], tuple(row["from"])) for row in rows] for page, rows in pages.items()}


def figures_of(text: str, entries: Sequence[Entry], records: Path = RECORDS) -> list[Figure]:
    """The numbers of a page that come from records.

    Raises:
        FigureError: an entry's line does not stand on the page, or not as often as it has entries; or it has not one
            source for each number.
    """
    figures, seen = [], Counter[str]()
    wanted = Counter(entry.line for entry in entries)
    for entry in entries:
        found = entry.found_in(text)
        if len(found) != wanted[entry.line]:
            raise FigureError(f"got {len(found)} of {entry.line!r}; wanted {wanted[entry.line]}: change figures.toml")
        match = found[seen[entry.line]]
        seen[entry.line] += 1
        if len(match.groups()) != len(entry.sources):
            raise FigureError(f"got {len(entry.sources)} sources of {entry.line!r}; wanted one for each {{}}")
        for group, source in enumerate(entry.sources, start=1):
            after = text[match.end(group) : match.end(group) + 4]
            figures.append(Figure(match[group], match.span(group), after, source, records))
    return figures


def look_up(record: Any, place: str) -> Any:
    """`a.b[0].c`, or `a[name=x,size=2].c`: the one row whose fields are these; `a.count` of a list is its length."""
    for name, chosen in STEP.findall(place):
        if name:
            record = len(record) if name == "count" and isinstance(record, list) else record[name]
        elif chosen.isdecimal():
            record = record[int(chosen)]
        else:
            wanted = dict(pair.split("=") for pair in chosen.split(","))
            (record,) = [row for row in record if all(_same(row[key], text) for key, text in wanted.items())]
    return record


def _same(value: Any, text: str) -> bool:
    return value == float(text) if isinstance(value, (int, float)) else str(value) == text


def main() -> None:
    """Write the records' values into all pages."""
    for page, entries in all_entries().items():
        text = page.read_text(encoding="utf-8")
        for figure in sorted(figures_of(text, entries), key=lambda figure: figure.span, reverse=True):
            start, end = figure.span
            text = text[:start] + figure.as_recorded() + text[end:]
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
