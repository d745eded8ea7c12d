"""A memory plan as rows, text and a picture. Figures come from the plan; nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import MemoryPlanError
from .cards import GIB, MIB
from .ledger import MOMENTS, RUNNING
from .plan import FrontierPoint, MemoryPlan

LEDGER_COLUMNS = ("term", "size", "alive during", "formula")


def size_text(num_bytes: int) -> str:
    """`"5.31 GiB"`, `"112 MiB"`, `"64 B"`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes:,} B"


def ledger_rows(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """One row per term under `LEDGER_COLUMNS`, largest first."""
    rows: list[tuple[str, ...]] = []
    for term in sorted(plan.ledger, key=lambda term: -term.num_bytes):
        when = "always" if set(RUNNING) <= set(term.moments) else ", ".join(term.moments)
        rows.append((term.name, size_text(term.num_bytes), when, term.formula))
    return rows


def decision_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What was decided, as (name, value)."""
    settings, target = plan.settings, plan.target
    rows = [
        ("target", f"{target.name}, {target.num_parameters / 1e9:.2f}B parameters, {target.quantization.name}"),
        ("card", f"{plan.card.name}, {size_text(plan.budget_bytes)} of {size_text(plan.card.total_bytes)} to use"),
        ("fits", "yes" if plan.fits else "no"),
        ("peak", f"{size_text(plan.peak_bytes)}, at {plan.peak_moment}"),
        ("largest term", f"{plan.largest_term.name}, {size_text(plan.largest_term.num_bytes)}"),
        ("context", f"{settings.context:,} (longest that fits: {plan.longest_context:,})"),
        ("batch", str(settings.batch)),
        ("prefill chunk", f"{settings.prefill_chunk:,}"),
        ("cache", f"{settings.cache_type}, {settings.cache_capacity:,} slots per row"),
        ("draft", _draft_text(plan)),
    ]
    rows += [("would fit", f"{other.what} {other.value}") for other in plan.alternatives]
    return rows


def _draft_text(plan: MemoryPlan) -> str:
    settings = plan.settings
    if not settings.speculates:
        return "none: no drafter" + ("" if plan.drafter is None else " fits beside the target")
    depth, nodes = settings.draft_tokens, settings.tree_size
    if settings.draft_is_usual:
        shape = f"chains of up to {depth} tokens" + (f", trees of {nodes} nodes for sampled texts" if nodes else "")
    else:
        shape = f"tree of {nodes} nodes, depth {depth}" if nodes else f"chain of {depth} tokens"
    return f"{shape}, drafter in {settings.drafter_precision} precision (+{size_text(plan.drafter_bytes)})"


def frontier_rows(points: Sequence[FrontierPoint]) -> list[tuple[str, ...]]:
    """Context and draft down, cache types across: the peak, or `-` where it does not fit. The first row is a header."""
    kinds = list(dict.fromkeys(point.cache_type for point in points))
    cells = {(point.context, point.draft_tokens, point.cache_type): point for point in points}
    rows: list[tuple[str, ...]] = [("context", "draft tokens", *(f"{kind} cache" for kind in kinds))]
    for context, depth in dict.fromkeys((point.context, point.draft_tokens) for point in points):
        found = [cells.get((context, depth, kind)) for kind in kinds]
        sizes = (size_text(point.peak_bytes) if point and point.fits else "-" for point in found)
        rows.append((f"{context:,}", str(depth), *sizes))
    return rows


def _bars(plan: MemoryPlan, moments: Sequence[str]) -> list[tuple[str, list[float]]]:
    """Name and GiB at each moment, what lives longest first. Slivers nobody could find in a picture are one bar."""
    bars, slivers = [], [0.0] * len(moments)
    for term in sorted(plan.ledger, key=lambda term: (-len(term.moments), -term.num_bytes)):
        heights = [term.num_bytes / GIB if moment in term.moments else 0.0 for moment in moments]
        if term.num_bytes * 100 > plan.peak_bytes:
            bars.append((term.name, heights))
        else:
            slivers = [low + height for low, height in zip(slivers, heights, strict=True)]
    return [*bars, ("all else, each below 1 %", slivers)] if any(slivers) else bars


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    """So many colours, no two alike."""
    from matplotlib import colormaps

    few = colormaps["tab20"]
    return [few(i) for i in range(count)] if count <= few.N else [*colormaps["turbo"].resampled(count)(range(count))]


def plot_ledger(plan: MemoryPlan, path: str | Path) -> None:
    """Draw the ledger as one stacked bar per moment against what the card gives. Needs matplotlib.

    Raises:
        MemoryPlanError: matplotlib is not installed, or the picture cannot be written there or in that format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MemoryPlanError("a plot needs matplotlib: pip install matplotlib") from error
    moments = [moment for moment in MOMENTS if plan.bytes_by_moment[moment]]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    floor = [0.0] * len(moments)
    for (name, heights), colour in zip(bars := _bars(plan, moments), _colours(len(bars)), strict=True):
        axes.bar(moments, heights, bottom=floor, label=name, color=colour)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.axhline(plan.budget_bytes / GIB, color="black", linestyle="--", label=f"{plan.card.name}, less margin")
    axes.set_ylabel("GiB")
    axes.set_title(f"{plan.target.name}, {plan.target.quantization.name}, context {plan.settings.context:,}")
    figure.legend(loc="outside right upper", fontsize="small")
    try:
        figure.savefig(str(path), dpi=150)
    except (OSError, ValueError) as error:
        raise MemoryPlanError(
            f"got {str(path)!r} for the plot, which cannot be written ({error}); wanted a name such as plan.png or "
            "plan.svg in a folder that is there"
        ) from error
