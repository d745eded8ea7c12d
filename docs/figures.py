"""Figures in README and docs, held against the records they come from.

docs/figures.toml says for each page which of its numbers stands in which record:

    [["README.md"]]
    line = "| prompt lookup | {}× | {}× |"
    from = ["run-t0.json methods[method=prompt lookup].speedup.median", "run-t1.json methods[…].speedup.median"]

`line` is a row of a table or a piece of a line of the page, `{}` a number in it; one that stands on a page more than
once has an entry for each time, in their order. `python docs/figures.py` (`make figures`) writes the records' values
into the pages, with as many digits as stand there; the tests only look. A figure from before records is dated: its
line or section names the day, `2026-11-23`, and `[days]` in figures.toml holds what was measured on it; or it links to
a model card that holds it. What stands in `code` is a setting or a definition.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "developing").glob("*.md")),
]

TITLED = re.compile(r"\]\([^)\s]*records/[^)\s]+ +[\"'(]")
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
CODE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?"
UNIT = r"(?: ?(?:×|%|ms\b|µs\b)| (?:tokens/s|minutes\b|seconds\b))"
IN_PROSE = re.compile(rf"(?<![\w.\-/#])(?:{NUMBER}(?={UNIT})|\d+\.\d\d+(?![\w.]))")
IN_TABLES = re.compile(rf"(?<![\w.\-/#])(?:{NUMBER}(?={UNIT})|[+−-]?\d[\d,]*\.\d+(?![\w.]))")
NOT_MEASURED = re.compile(
    r"(?:arXiv|[A-Z][A-Za-z]+|torch|transformers|bitsandbytes|from|≥) ?\d+(?:\.\d+)+\b"  # Llama 3.1, torch 2.13, 0.22
    r"|\b\d+\.\d+\.\d+\b|`[^`]*`|https?://\S+"
)
SHORTER = {"seconds": r"(?:seconds|s\b)", "minutes": r"(?:minutes|min\b)"}
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


def _said() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / "figures.toml").read_text(encoding="utf-8"))


def entries_of(page: Path) -> list[Entry]:
    """What docs/figures.toml says of a page."""
    rows = _said().get(page.relative_to(ROOT).as_posix(), [])
    return [Entry(row["line"], tuple(row["from"])) for row in rows]


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


def without_figures(text: str, figures: Sequence[Figure]) -> str:
    """The text with a dot where a figure with a record stands, and without blocks of code."""
    for start, end in sorted((figure.span for figure in figures), reverse=True):
        text = text[:start] + "·" + text[end:]
    return CODE.sub("", text)


def _bare(line: str) -> str:
    return NOT_MEASURED.sub("", LINK.sub("]", line))


def unmarked_in_tables(text: str) -> list[str]:
    """Figures in the tables of such a text, whatever their lines link to."""
    return [figure for line in text.splitlines() if line[:1] == "|" for figure in IN_TABLES.findall(_bare(line))]


@dataclass(frozen=True)
class Unmarked:
    """A figure without a record: its number, its unit (empty in a table's cells), and by name what may hold it."""

    figure: str
    unit: str
    sources: dict[str, str]

    def has_source(self) -> bool:
        return any(self.stands_in(text) for text in self.sources.values())

    def stands_in(self, text: str) -> bool:
        """The same number with the same unit, or in a cell of a table, whose head may tell the unit."""
        number = rf"(?<![\d.]){re.escape(self.figure)}(?![\d.]\d|\d)"
        span = r"(?:(?:–| to | and | or | instead of )[\d.,]+)?"
        if not self.unit:
            return re.search(number, text) is not None
        with_unit = rf"{number}{span} ?{SHORTER.get(self.unit, re.escape(self.unit))}"
        return re.search(rf"{with_unit}|^\|.*{number}.*\|$", text, re.M) is not None


def unmarked_figures(page: Path, text: str) -> Iterator[Unmarked]:
    """Each figure of a text `without_figures`, with the days and cards that its line names, or if none, its section."""
    days = _said()["days"]
    for section in re.split(r"(?m)^(?=#)", text):
        for line in section.splitlines():
            bare = _bare(line)
            pattern = IN_TABLES if line.startswith("|") else IN_PROSE
            sources = _named(page, line, days) or _named(page, section, days)
            for found in pattern.finditer(bare):
                unit = re.match(UNIT, bare[found.end() :])
                yield Unmarked(found[0], unit[0].strip() if unit else "", sources)


def _named(page: Path, text: str, days: dict[str, list[str]]) -> dict[str, str]:
    """What was measured on the days, and the text of the model cards, that a text names."""
    found = {day: "\n".join(days[day]) for day in re.findall(r"\b\d{4}-\d\d-\d\d\b", text) if day in days}
    cards = [(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text)]
    cards = [card for card in cards if card.parent.name == "model_cards" and card.suffix == ".md"]
    return found | {card.name: card.read_text(encoding="utf-8") for card in cards}


def main() -> None:
    """Write the records' values into all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for figure in sorted(figures_of(text, entries_of(page)), key=lambda figure: figure.span, reverse=True):
            start, end = figure.span
            text = text[:start] + figure.as_recorded() + text[end:]
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
