"""Plots of a run, each with words that say the same for those who do not see it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigurationError
from ...stats import WINDOW_TOKENS, window_speeds
from ..ratios import spread_texts, times_text
from ..summary import MethodSummary
from ..tables import DataTable

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9", "#444444", "#B22222")
"""Colours that are told apart by colour-blind readers, too (after Okabe and Ito), and seen on white."""

MARKERS = "osD^vPX*"
MOST_BANDS = 3  # more cover each other
WIDTH, HEIGHT = 5.0, 3.1  # inches at 11 points: legible on a phone's width
STYLE: Any = {  # a dict whose keys matplotlib types one by one
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "svg.hashsalt": "eagle31", "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A picture, what it shows in words, and its figures; `name` is for files and links."""

    name: str
    title: str
    words: str
    svg: str
    table: DataTable


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install matplotlib jinja2") from error
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def _axes(height: float = HEIGHT, *, bars: bool = False, columns: int = 2) -> Iterator[tuple[Any, list[str]]]:
    """Axes to draw on, `bars` from above to below; the SVG, with a legend, is appended to the list at the end."""
    figure, made = new_figure(WIDTH, height), list[str]()
    from matplotlib import rc_context  # there, or this had been told

    with rc_context(STYLE):
        axes = figure.add_subplot()
        yield axes, made
        if bars:
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=columns)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        made.append(file.getvalue())


def colours(methods: Sequence[MethodSummary]) -> dict[str, str]:
    """One for each method, the same in all plots of a section."""
    return {method.method: PALETTE[i % len(PALETTE)] for i, method in enumerate(methods)}


def draw_all(
    name: str, methods: Sequence[MethodSummary], ledger: dict[str, Any] | None, counted: str = ""
) -> list[Plot]:
    """Every plot the records have figures for; `counted` says of what the peak of memory is."""
    made = (
        categories_plot(name, methods),
        positions_plot(name, methods),
        rounds_plot(name, methods),
        pace_plot(name, methods),
        memory_plot(name, methods, ledger, counted),
    )
    return [plot for plot in made if plot is not None]


# --- speedup by category ----------------------------------------------------------------------------------------------


def categories_plot(name: str, methods: Sequence[MethodSummary]) -> Plot | None:
    """Bars with intervals, one group per category."""
    shown = [method for method in methods if method.drafts and method.speedup is not None]
    names = list(dict.fromkeys(category for method in shown for category in method.categories))
    if not names:
        return None
    colour, thick = colours(methods), 0.8 / len(shown)
    with _axes(max(HEIGHT, 0.5 + 0.32 * len(names) * max(1, len(shown) * 0.55)), bars=True) as (axes, made):
        for number, method in enumerate(shown):
            for row, category in enumerate(names):
                speedup = method.categories[category].speedup if category in method.categories else None
                if speedup is None:
                    continue
                low, high = speedup.interval or (speedup.low, speedup.high)
                error = [[max(0.0, speedup.median - low)], [max(0.0, high - speedup.median)]]
                axes.barh(
                    row + (number - (len(shown) - 1) / 2) * thick, speedup.median, thick * 0.92, xerr=error,
                    color=colour[method.method], label=method.method if row == 0 else None,
                    error_kw={"lw": 1, "ecolor": "#222222"},
                )  # fmt: skip
        axes.axvline(1.0, color="#222222", lw=1, ls="--")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("speedup over plain generate (dashed: as fast)")
    rows = tuple((c, *(_category_cell(method, c) for method in shown)) for c in names)
    table = DataTable(
        "Speedup over plain generate (95 % interval over prompts)", ("category", *(m.method for m in shown)), rows
    )
    return Plot(f"{name}-categories", "Speedup by category", _category_words(shown, names), made[0], table)


def _category_cell(method: MethodSummary, category: str) -> str:
    part = method.categories.get(category)
    if part is None or part.speedup is None:
        return "–"
    _, interval = spread_texts(part.speedup)
    return times_text(part.speedup) + (f" ({interval})" if interval else "")


def _category_words(methods: Sequence[MethodSummary], names: Sequence[str]) -> str:
    told = []
    for method in methods:
        found = {c: p.speedup.median for c, p in method.categories.items() if p.speedup is not None}
        best, worst = max(found, key=lambda c: found[c]), min(found, key=lambda c: found[c])
        span = f" for {best}" if best == worst else f" for {worst} to {found[best]:.2f} times for {best}"
        told.append(f"{method.method} from {found[worst]:.2f} times{span}")
    return f"Bars of the speedup over plain generate in {len(names)} categories of prompts: {'; '.join(told)}."


# --- acceptance by position -------------------------------------------------------------------------------------------


def positions_plot(name: str, methods: Sequence[MethodSummary]) -> Plot | None:
    """How far drafts are accepted."""
    shown = [method for method in methods if method.acceptance.cumulative]
    if not shown:
        return None
    colour = colours(methods)
    with _axes() as (axes, made):
        for marker, method in zip(MARKERS, shown, strict=False):
            kept = method.acceptance.cumulative
            places = range(1, len(kept) + 1)
            axes.plot(places, kept, color=colour[method.method], marker=marker, label=method.method)
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, 1 + max(len(method.acceptance.cumulative) for method in shown)))
        axes.set_xlabel("draft position")
        axes.set_ylabel("accepted, of drafts so deep")
    deepest = max(len(method.acceptance.cumulative) for method in shown)
    rows = tuple((str(place + 1), *(_position_cell(method, place) for method in shown)) for place in range(deepest))
    table = DataTable(
        "Share of drafts accepted at a position (share of those that were accepted up to it)",
        ("position", *(method.method for method in shown)),
        rows,
    )
    told = "; ".join(
        f"{m.method} {m.acceptance.cumulative[0]:.0%} at the first, {m.acceptance.cumulative[-1]:.0%} at position "
        f"{len(m.acceptance.cumulative)}"
        for m in shown
    )
    words = f"Lines of the share of draft tokens accepted at each position: {told}."
    return Plot(f"{name}-positions", "Acceptance by position", words, made[0], table)


def _position_cell(method: MethodSummary, place: int) -> str:
    kept, given = method.acceptance.cumulative, method.acceptance.conditional
    if place >= len(kept):
        return "–"
    return f"{kept[place]:.2f}" + (f" ({given[place]:.2f})" if place < len(given) else "")


# --- where a round's time goes ----------------------------------------------------------------------------------------


def rounds_plot(name: str, methods: Sequence[MethodSummary]) -> Plot | None:
    """Stacked bars of drafting, verification and the rest."""
    parts = {method.method: method.round_ms for method in methods if method.round_ms is not None}
    if not parts:
        return None
    names = ("draft", "verify", "other")
    with _axes(max(2.0, 0.9 + 0.42 * len(parts)), bars=True, columns=3) as (axes, made):
        start = np.zeros(len(parts))
        for colour, part in zip(PALETTE, names, strict=False):
            widths = np.array([each[part] for each in parts.values()])
            axes.barh(list(parts), widths, 0.6, left=start, color=colour, label=part, edgecolor="white")
            start += widths
        axes.set_xlabel("ms of a round")
    whole = {method: sum(each.values()) for method, each in parts.items()}
    rows = tuple((method, *(f"{ms:.2f}" for ms in (*each.values(), whole[method]))) for method, each in parts.items())
    table = DataTable("Mean host milliseconds of a round", ("method", *names, "round"), rows)
    told = "; ".join(
        f"{method} {whole[method]:.1f} ms, {each['verify'] / whole[method]:.0%} of it verification"
        for method, each in parts.items()
    )
    return Plot(f"{name}-rounds", "Where a round's time goes", f"Stacked bars of a mean round: {told}.", made[0], table)


# --- speed along the text ---------------------------------------------------------------------------------------------


def pace_plot(name: str, methods: Sequence[MethodSummary]) -> Plot | None:
    """Median speed of each stretch of the texts, and the middle half of them."""
    pace = {method.method: _pace(method) for method in methods}
    pace = {method: found for method, found in pace.items() if len(found) > 1}
    if not pace:
        return None
    colour, with_bands = colours(methods), len(pace) <= MOST_BANDS
    with _axes() as (axes, made):
        for marker, (method, found) in zip(MARKERS, pace.items(), strict=False):
            at = [WINDOW_TOKENS * (i + 0.5) for i in range(len(found))]
            low, middle, high = np.array(found).T
            if with_bands:
                axes.fill_between(at, low, high, color=colour[method], alpha=0.15, lw=0)
            axes.plot(at, middle, color=colour[method], marker=marker, ms=4, label=method)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens written")
        axes.set_ylabel("tokens per second")
    longest = max(map(len, pace.values()))
    rows = tuple(
        (f"{i * WINDOW_TOKENS + 1}–{(i + 1) * WINDOW_TOKENS}",
         *(f"{found[i][1]:.1f}" if i < len(found) else "–" for found in pace.values()))
        for i in range(longest)
    )  # fmt: skip
    table = DataTable("Median tokens per second along the text", ("tokens", *pace), rows)
    told = "; ".join(f"{m} {found[0][1]:.0f} at first, {found[-1][1]:.0f} at the end" for m, found in pace.items())
    bands = ", with the middle half of the texts" if with_bands else ""
    words = f"Lines of the median tokens per second along the text{bands}: {told}."
    return Plot(f"{name}-pace", "Tokens per second over the text", words, made[0], table)


def _pace(method: MethodSummary) -> list[tuple[float, float, float]]:
    """Quartiles of the speed of each stretch that at least half of the texts reach."""
    speeds = [window_speeds(call.window_s) for call in method.calls if call.window_s]
    if not speeds:
        return []
    reached = sorted((len(each) for each in speeds), reverse=True)[(len(speeds) - 1) // 2]
    found = []
    for place in range(reached):
        low, middle, high = np.percentile([each[place] for each in speeds if place < len(each)], [25, 50, 75])
        found.append((float(low), float(middle), float(high)))
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_plot(
    name: str, methods: Sequence[MethodSummary], ledger: dict[str, Any] | None, counted: str = ""
) -> Plot | None:
    """The plan's terms, largest first, and what each method took at its peak."""
    terms = sorted(((t["name"], t["bytes"]) for t in (ledger or {}).get("terms", ())), key=lambda term: -term[1])
    peaks = [(method.method, method.peak_bytes) for method in methods if method.peak_bytes is not None]
    if not terms and not peaks:
        return None
    bars = [(f"plan: {term}", size) for term, size in terms] + [(f"taken: {method}", size) for method, size in peaks]
    with _axes(0.8 + 0.3 * len(bars), bars=True) as (axes, made):
        tints = [PALETTE[2]] * len(terms) + [PALETTE[1]] * len(peaks)
        drawn = axes.barh([label for label, _ in bars], [size / 1e6 for _, size in bars], 0.65, color=tints)
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=9)
        axes.margins(x=0.16, y=0.01)
        axes.set_xlabel("MB")
    rows = tuple((label, f"{size / 1e6:.1f}") for label, size in bars)
    total = sum(size for _, size in terms)
    planned = f"The plan's terms add up to {total / 1e6:.0f} MB; the largest is {terms[0][0]}. " if terms else ""
    most = max((size for _, size in peaks), default=0)
    caption = f"Memory in MB; taken: {counted}" if peaks and counted else "Memory in MB"
    words = f"Bars of memory. {planned}" + (f"The most any method took is {most / 1e6:.0f} MB." if peaks else "")
    return Plot(f"{name}-memory", "Memory", words, made[0], DataTable(caption, ("what", "MB"), rows))
