"""Pictures of figures: speed by kind of prompt, acceptance by position, what fills a card, drift.

They need matplotlib, and raise a `ConfigurationError` where the picture cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..memory.cards import GIB
from ..memory.plan import part_bytes
from .results import BenchResult, MethodResult
from .tables import verdict_line

if TYPE_CHECKING:
    from ..memory import MemoryPlan
    from .drift import DriftCurve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9", "#444444", "#B22222")
"""Colours that are told apart by colour-blind readers, too (after Okabe and Ito), and seen on white."""
MARKERS = "osD^vPX*"
STYLE: Any = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 10,
}  # fmt: skip


def plot_bench(result: BenchResult, path: Path, *, title: str, footer: str) -> None:
    """Speed over plain `generate` by kind of prompt, and below it how far drafts are accepted; of the fewest rows.

    Upright, so that it can be read on a phone.

    Args:
        title: what was measured.
        footer: where, and how.
    """
    shown = [each for each in result.with_rows(min(each.rows for each in result.methods)) if each.method.drafts]
    kinds = list(dict.fromkeys(kind for each in shown for kind in each.by_kind))
    height = max(2.6, 0.8 + 0.3 * len(kinds) * len(shown))
    figure = _new_figure(6.4, height + 4.6)
    upper, lower = figure.subplots(2, 1, height_ratios=[height, 3])
    _draw_kinds(upper, shown, kinds)
    _draw_positions(lower, shown)
    figure.suptitle(f"{title}\n{verdict_line(result)}", fontsize=13, wrap=True)
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.supxlabel(footer, fontsize=9, wrap=True)
    _save(figure, path)


def _draw_kinds(axes: Any, results: Sequence[MethodResult], kinds: Sequence[str]) -> None:
    """Bars from the smallest to the largest repeat; methods whose text is wrong have none."""
    thick = 0.8 / max(1, len(results))
    for number, result in enumerate(results):
        speeds = {place: result.by_kind[kind].speedup for place, kind in enumerate(kinds) if kind in result.by_kind}
        known = {place: speed for place, speed in speeds.items() if speed is not None}
        bars = axes.barh(
            [place + (number - (len(results) - 1) / 2) * thick for place in known],
            [speed.median for speed in known.values()],
            thick * 0.92,
            xerr=[[s.median - s.low for s in known.values()], [s.high - s.median for s in known.values()]],
            label=result.method.name,
            error_kw={"lw": 1},
        )
        axes.bar_label(
            bars,
            [f" {speed.median:.2f}" for speed in known.values()],
            padding=2,
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.axvline(1.0, color="#222222", lw=1, ls="--")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("times as fast as plain generate (dashed: as fast)")


FEWEST_TRIED = 30
"""Drafts that reach a place of the picture, in long runs: a share of fewer may be off by more than a tenth."""


def _draw_positions(axes: Any, results: Sequence[MethodResult]) -> None:
    for result, marker in zip(results, cycle(MARKERS), strict=False):
        tried = result.acceptance.drafted_at
        often = [count for count in tried if count >= min(FEWEST_TRIED, tried[0])]
        shares = result.acceptance.cumulative_acceptance[: len(often)]
        axes.plot(range(1, 1 + len(shares)), shares, marker=marker, label=result.method.name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("place of a token in its draft")
    axes.set_ylabel("share accepted at this place")


def plot_card(plan: MemoryPlan, path: Path) -> None:
    """What fills the card at the moment when most is alive, as one bar."""
    figure, start = _new_figure(10, 2.4), 0.0
    axes = figure.add_subplot()
    for name, num_bytes in part_bytes(plan).items():
        size, empty = num_bytes / GIB, {"color": "white"} if name == "left free" else {}
        axes.barh([0], [size], left=start, edgecolor="#555555", label=f"{name} {size:.1f}", **empty)
        start += size
    axes.axvline(plan.card.total_bytes / GIB, color="#222222", lw=1, ls="--")
    axes.set_yticks([])
    axes.set_xlabel(f"GiB of {plan.card.name}: {plan.target.name}, {plan.settings.context:,} tokens")
    figure.legend(loc="outside upper center", ncols=4)
    _save(figure, path)


PANELS = {
    "sink": "share of attention on the prompt's first tokens",
    "own": "share of attention on the draft's own tokens",
    "feedback_norm": "length of the fed-back state, 1 after the first depth",
    "acceptance": "acceptance, given that all before were accepted",
}


def plot_drift(curves: Sequence[DriftCurve], path: Path) -> None:
    """Attention by depth under each condition, the fed-back state's length, acceptance."""
    figure = _new_figure(10, 7)
    axes = figure.subplots(2, 2)
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for curve in curves:
            axis.plot(range(1, len(curve.sink) + 1), getattr(curve, name), "-o", markersize=3, label=curve.condition)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("draft depth")
        axis.set_ylim(0, 1.08 * max(max(getattr(curve, name)) for curve in curves) or 1.0)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    _save(figure, path)


def _new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches."""
    from cycler import cycler
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)})
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"got {str(path)!r} for the plot, which cannot be written ({error}); wanted a name such as plot.png or "
            "plot.svg in a folder that is there"
        ) from error
