"""Figures as tables and lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from ..errors import count
from ..memory.cards import GIB, MIB
from ..stats import USELESS_LENGTH
from .exactness import Kind, Verdict
from .results import BenchResult, MethodResult, Spread, Writer

REFUSED = "refused"
"""In place of a speedup that may not be told."""
_OF_CELLS = {REFUSED: "bold red", "NO": "bold red", "yes": "green", "up to ties": "green"}


def figure_table(rows: Sequence[Mapping[str, str]], *, wraps: bool = False) -> Table:
    """Rows of cells by heading, the first of each its name, without columns that no row has anything for.

    Args:
        wraps: cells may take several lines.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    kept = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    for place, heading in enumerate(kept):
        style = "bold" if heading == "speedup" else ""
        justify: JustifyMethod = "right" if place else "left"
        table.add_column(heading, justify=justify, no_wrap=not (wraps and place), style=style)
    for row in rows:
        table.add_row(*(Text(row[heading], style=_OF_CELLS.get(row[heading], "")) for heading in kept))
    return table


def heading(text: str) -> Text:
    """Above a table, whose title would be as narrow as the table."""
    return Text(f"\n{text}", style="bold")


def verdict_text(result: MethodResult) -> str:
    """Whether the text is plain `generate`'s."""
    verdicts = result.verdicts
    if verdicts[Kind.DIFFERENT]:
        return "NO"
    return "up to ties" if verdicts[Kind.TIE] else "yes" if verdicts[Kind.SAME] else ""


def verdict_line(result: BenchResult) -> str:
    """Of all methods: is every text plain `generate`'s?"""
    found = Counter[Kind]()
    for each in result.methods:
        found += each.verdicts
    compared = found.total() - found[Kind.REFERENCE]
    if found[Kind.DIFFERENT]:
        return f"NOT the same text: {found[Kind.DIFFERENT]} of {compared} differ beyond ties"
    ties = f", {found[Kind.TIE]} up to a tie within rounding" if found[Kind.TIE] else ""
    return f"the same text as plain generate: {compared} of {compared}{ties}"


def speedup_text(result: MethodResult) -> str:
    return REFUSED if result.speedup is None else f"{result.speedup.median:.2f}×"


def speed_table(results: Sequence[MethodResult]) -> Table:
    """Exactness first, then speeds over plain `generate`."""

    def spread(speed: Spread) -> str:
        return f"{speed.low:.0f}–{speed.high:.0f}" if speed.low < speed.high else ""  # there was one repeat

    rows = [
        {
            "": result.method.name,
            "same text": verdict_text(result),
            "tokens/s": f"{result.tokens_per_s.median:.1f}",
            "spread": spread(result.tokens_per_s),
            "speedup": speedup_text(result),
            "tokens a pass": f"{result.tokens_per_pass:.2f}" if result.method.drafts and result.tokens_per_pass else "",
        }
        for result in results
    ]
    return figure_table(rows)


def cost_table(results: Sequence[MethodResult], price_per_hour: float | None) -> Table:
    """What a reader waits for, in milliseconds, and what it takes."""
    gaps = {"gap": "p50", "95 %": "p95", "99 %": "p99"}
    rows = [
        {
            "": result.method.name,
            "first": f"{result.first_token_s['p50'] * 1e3:.0f}",
            **{name: f"{result.gap_s[part] * 1e3:.0f}" if result.gap_s else "" for name, part in gaps.items()},
            "memory": "" if result.peak_bytes is None else f"{result.peak_bytes / GIB:.2f} GiB",
            "over plain": "" if result.bytes_over_plain is None else f"{round(result.bytes_over_plain / MIB):+d} MiB",
            "per 1M": "" if price_per_hour is None else f"{result.price_per_million(price_per_hour):.2f}",
        }
        for result in results
    ]
    return figure_table(rows)


def kind_table(results: Sequence[MethodResult]) -> Table:
    """Speedup and tokens a pass by kind of prompt, of the methods that draft."""
    drafting = [result for result in results if result.method.drafts]

    def cell(part: MethodResult) -> str:
        length = part.tokens_per_pass
        return speedup_text(part) + ("" if length is None else f" ({length:.2f})")

    kinds = dict.fromkeys(kind for result in drafting for kind in result.by_kind)
    rows = [{"kind": kind, **{each.method.name: cell(each.by_kind[kind]) for each in drafting}} for kind in kinds]
    return figure_table(rows, wraps=True)


def conditions_line(result: BenchResult, origin: dict[str, Any]) -> Text:
    """What was measured where."""
    temperature = result.settings.temperature
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    repeats = len({call.turn.repeat for call in result.calls})  # fewer than planned where time ran out
    written = "one repeat" if repeats == 1 else f"medians and spreads of {repeats} repeats"
    device = count(origin["threads"], "CPU thread") if origin["device"] == "cpu" else origin["device"]
    return Text(
        f"{count(result.num_prompts, 'prompt')}, up to {result.settings.new_tokens} tokens each, {sampling}, {device} "
        f"({origin['processor']}), {origin['dtype']}; {written}",
        style="dim",
    )


def bench_parts(result: BenchResult, price_per_hour: float | None = None) -> Iterator[Table | Text]:
    """Everything that `eagle31 bench` shows."""
    settings = result.settings
    yield Text(verdict_line(result), style="bold" if result.is_exact else "bold red")
    sampling = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
    for rows in dict.fromkeys(each.rows for each in result.methods):
        results = result.with_rows(rows)
        where = f"{sampling}, {count(rows, 'row')}"
        yield heading(where)
        yield speed_table(results)
        yield heading(f"{where}: ms until the first token and between tokens, memory")
        yield cost_table(results, price_per_hour)
        if len(results[0].by_kind) > 1:
            yield heading(f"{where}: speedup (tokens a pass) by kind")
            yield kind_table(results)
    yield from bench_notes(result)


def bench_notes(result: BenchResult) -> Iterator[Text]:
    """What tables cannot say: ties and errors, what was left out, steps down."""
    lines = []
    if result.turns < result.of:
        why = "by Ctrl-C" if result.interrupted else f"after {result.settings.minutes:g} min"
        lines.append(f"Stopped {why}: {result.turns} of {result.of} measurements were made.")
    lines += [f"Left out: {name}: {why}." for name, why in result.left_out.items()]
    for each in result.methods:
        lines += [f"{each.method.name}: {line}." for line in difference_lines(each)]
        lines += [f"{each.method.name}: served by {loop}." for loop in each.served_by]
        if each.method.drafts and each.speedup is not None and each.speedup.median < 1:
            lines.append(f"{each.method.name}: slower than plain; {_what_may_help(each)}.")
    yield from (Text(line, style="dim") for line in (["", *lines] if lines else []))


def _what_may_help(result: MethodResult) -> str:
    """Where drafts make a text slower."""
    length = result.tokens_per_pass
    if result.method.writer is Writer.DRAFTER and length is not None and length < USELESS_LENGTH:
        return f"{length:.2f} tokens a pass are too few: train a drafter (eagle31 train)"
    return f"try {'' if result.method.by_graphs else 'graphs (eagle31 warmup) or '}fewer --draft-tokens"


def difference_lines(result: MethodResult) -> Iterator[str]:
    """Where texts part from plain's: a line for each that is wrong, one for all that part at ties."""

    def place(prompt: str, found: Verdict) -> str:
        return (
            f"in {prompt} from token {found.position + 1} on (two logits are {found.logit_gap:.3g} apart, rounding "
            f"moves them by {found.rounding:.3g})"
        )

    for prompt, found in result.answers_of(Kind.DIFFERENT).items():
        yield f"another text, and not by a tie, {place(prompt, found)}"
    if ties := result.answers_of(Kind.TIE):
        widest = place(*max(ties.items(), key=lambda each: each[1].logit_gap))
        apart = "1 text differs by a tie" if len(ties) == 1 else f"{len(ties)} texts differ by ties"
        which = "" if len(ties) == 1 else "the widest "
        yield f"{apart}, two tokens equally likely within rounding, {which}{widest}"
