"""Figures as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .exactness import Kind
from .results import BenchResult, MethodResult, drafts

REFUSED = "refused"
"""In place of a speedup that may not be told."""
_OF_HEADINGS = {"speedup": "bold"}
_OF_CELLS = {REFUSED: "bold red", "NO": "bold red", "yes": "green", "yes, up to ties": "green"}


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


def verdict_text(result: MethodResult) -> str:
    """Whether the text is plain `generate`'s."""
    verdicts = result.verdicts
    if verdicts[Kind.DIFFERENT]:
        return "NO"
    return "yes, up to ties" if verdicts[Kind.TIE] else "yes" if verdicts[Kind.SAME] else ""


def speedup_text(result: MethodResult) -> str:
    return REFUSED if result.speedup is None else f"{result.speedup.median:.2f}×"


def speed_table(results: Sequence[MethodResult], caption: str = "") -> Table:
    """Exactness first, then speeds over plain `generate`."""
    rows = tuple(
        (
            result.method.name,
            verdict_text(result),
            f"{result.tokens_per_s.median:.1f}",
            f"{result.tokens_per_s.low:.0f}–{result.tokens_per_s.high:.0f}",
            speedup_text(result),
            _number(result.tokens_per_pass if drafts(result.method) else None, ".2f"),
        )
        for result in results
    )
    headings = ("", "same text", "tokens/s", "spread", "speedup", "tokens a pass")
    return DataTable(caption, headings, rows).filled().on_terminal()


def cost_table(results: Sequence[MethodResult], price_per_hour: float | None, caption: str = "") -> Table:
    """What a reader waits for, in milliseconds, and what it takes."""
    rows = tuple(
        (
            result.method.name,
            f"{result.first_token_s['p50'] * 1e3:.0f}",
            *(f"{result.gap_s[each] * 1e3:.0f}" if result.gap_s else "" for each in ("p50", "p95", "p99")),
            "" if result.peak_bytes is None else f"{result.peak_bytes / 1e9:.2f} GB",
            "" if result.bytes_over_plain is None else f"{result.bytes_over_plain / 1e6:+.0f} MB",
            "" if price_per_hour is None else f"{result.price_per_million(price_per_hour):.2f}",
        )
        for result in results
    )
    headings = ("", "first", "gap", "95 %", "99 %", "memory", "over plain", "per 1M")
    return DataTable(caption, headings, rows).filled().on_terminal()


def kind_table(results: Sequence[MethodResult], caption: str = "") -> Table:
    """Speedup and tokens a pass by kind of prompt, of the methods that draft."""
    drafting = [result for result in results if drafts(result.method)]

    def cell(part: MethodResult) -> str:
        length = part.tokens_per_pass
        return speedup_text(part) + ("" if length is None else f" ({length:.2f})")

    kinds = dict.fromkeys(kind for result in drafting for kind in result.by_kind)
    rows = tuple((kind, *(cell(result.by_kind[kind]) for result in drafting)) for kind in kinds)
    return DataTable(caption, ("kind", *(result.method.name for result in drafting)), rows).on_terminal(wraps=True)


def bench_parts(result: BenchResult, price_per_hour: float | None = None) -> Iterator[Table | Text]:
    """Everything that `eagle31 bench` shows."""
    settings = result.measured.settings
    sampling = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
    for rows in dict.fromkeys(settings.rows):
        results = result.with_rows(rows)
        where = f"{sampling}, {rows} row{'' if rows == 1 else 's'}"
        yield speed_table(results, where)
        yield cost_table(results, price_per_hour, f"{where}: ms until the first token and between tokens, memory")
        if len(results[0].by_kind) > 1:
            yield kind_table(results, f"{where}: speedup (tokens a pass) by kind")
    yield from bench_notes(result)


def bench_notes(result: BenchResult) -> Iterator[Text]:
    """What tables cannot say: ties and errors, what was left out, steps down."""
    measured = result.measured
    lines = [f"Left out: {name}: {why}." for name, why in measured.left_out.items()]
    if measured.graphs:
        lines.append(f"{measured.graphs} graphs were compiled in {measured.graphs_s:.0f} s and kept.")
    for each in result.methods:
        lines += [
            f"{each.method.name}, {prompt}, differs from its token {found.position + 1} on: "
            f"{'a tie' if found.kind is Kind.TIE else 'not a tie'} (logits {found.logit_gap:.3g} apart, the target's "
            f"own rounding moves them by {found.rounding:.3g})."
            for prompt, found in each.differences.items()
        ]
        lines += [f"{each.method.name}: served by {loop}." for loop in each.served_by]
        if drafts(each.method) and each.speedup is not None and each.speedup.median < 1:
            lines.append(f"{each.method.name}: slower than plain here; try graphs, or fewer --draft-tokens.")
    yield from (Text(line, style="dim") for line in lines)


def _number(value: float | None, spec: str) -> str:
    """A figure with so many digits; empty where there is none."""
    return "" if value is None else format(value, spec)
