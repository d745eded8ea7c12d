"""Figures in README and docs, held against the records they come from.

A figure is written as a link to its record with the place in it as the title:

    [5.72×](docs/records/run.json "methods[method=chain compiled,temperature=0].speedup.median")

`python docs/figures.py` (`make figures`) puts the records' values in, with as many digits as stand there; the tests
only look. A figure from before records stands, digit by digit and with its unit, in a page of docs/history or in a
model card that its line or section links to. What stands in `code` is a setting or a definition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

MARKED = re.compile(r"\[([^\]]+)\]\(([^)\s]*records/[^)\s]+\.json) \"([^\"]+)\"\)")
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
class Marked:
    """A figure with its record: what stands on the page, where its record lies, and where in it."""

    page: Path
    shown: str
    record: Path
    place: str

    def value(self) -> float:
        """What the record says, in the unit that is shown."""
        scale = next((by for unit, by in SCALES.items() if self.shown.endswith(unit)), 1.0)
        try:
            return float(self._found()) * scale
        except (TypeError, ValueError) as error:
            raise self._error() from error

    def _found(self) -> Any:
        try:
            return look_up(json.loads(self.record.read_text(encoding="utf-8")), self.place)
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error() from error

    def _error(self) -> FigureError:
        return FigureError(f"{self.page.name}: {self.shown} is not at {self.place} of {self.record.name}")

    def as_recorded(self) -> str:
        """The text on the page with the record's value in it, rounded to the digits that stand there; words as is."""
        words = self._found()
        if isinstance(words, str):
            return words
        number = re.search(NUMBER, self.shown)
        if number is None:
            raise FigureError(f"{self.page.name}: {self.shown!r} holds no number")
        digits = len(number[0].partition(".")[2])
        value = f"{self.value():{'+' if number[0][0] in '+−' else ''},.{digits}f}".replace("-", "−")
        return self.shown[: number.start()] + value + self.shown[number.end() :]


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


def marked_figures(page: Path) -> list[Marked]:
    return [
        Marked(page, shown, (page.parent / record).resolve(), place)
        for shown, record, place in MARKED.findall(page.read_text(encoding="utf-8"))
    ]


def unmarked_in_tables(page: Path) -> list[str]:
    """Figures in a page's tables that are not marked, whatever their lines link to."""
    lines = CODE.sub("", page.read_text(encoding="utf-8")).splitlines()
    bare = [NOT_MEASURED.sub("", LINK.sub("]", MARKED.sub("", line))) for line in lines if line.startswith("|")]
    return [figure for line in bare for figure in IN_TABLES.findall(line)]


@dataclass(frozen=True)
class Unmarked:
    """A figure without a record: its number, its unit (empty in a table's cells), and the pages that may hold it."""

    figure: str
    unit: str
    sources: list[Path]

    def stands_in(self, text: str) -> bool:
        """The same number with the same unit, or in a cell of a table, whose head may tell the unit."""
        number = rf"(?<![\d.]){re.escape(self.figure)}(?![\d.]\d|\d)"
        span = r"(?:(?:–| to | and | or | instead of )[\d.,]+)?"
        if not self.unit:
            return re.search(number, text) is not None
        with_unit = rf"{number}{span} ?{SHORTER.get(self.unit, re.escape(self.unit))}"
        return re.search(rf"{with_unit}|^\|.*{number}.*\|$", text, re.M) is not None


def unmarked_figures(page: Path) -> Iterator[Unmarked]:
    """Each other figure, with the pages its line links to; if it links to none, those that its section does."""
    for section in re.split(r"(?m)^(?=#)", CODE.sub("", page.read_text(encoding="utf-8"))):
        for line in section.splitlines():
            bare = NOT_MEASURED.sub("", LINK.sub("]", MARKED.sub("", line)))
            pattern = IN_TABLES if line.startswith("|") else IN_PROSE
            sources = _linked(page, line) or _linked(page, section)
            for found in pattern.finditer(bare):
                unit = re.match(UNIT, bare[found.end() :])
                yield Unmarked(found[0], unit[0].strip() if unit else "", sources)


def _linked(page: Path, text: str) -> list[Path]:
    """Records in prose that a text links to: days of docs/history and model cards."""
    paths = [(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text)]
    return [path for path in paths if path.parent.name in ("history", "model_cards") and path.suffix == ".md"]


def main() -> None:
    """Write the records' values into all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for figure in marked_figures(page):
            before, after = f"[{figure.shown}](", f"[{figure.as_recorded()}]("
            link = f'records/{figure.record.name} "{figure.place}")'
            text = re.sub(
                rf"{re.escape(before)}([^)\s]*){re.escape(link)}",
                lambda found, after=after, link=link: f"{after}{found[1]}{link}",
                text,
            )
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
