"""Speeds of some calls over others': medians over repeats, and an interval over prompts. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from .calls import CallRecord

RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class Spread:
    """A figure's median over repeats, smallest and largest, and the interval over prompts where there is one."""

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None = None

    @classmethod
    def over(cls, values: Sequence[float], interval: tuple[float, float] | None = None) -> Spread:
        return cls(median(values), min(values), max(values), interval)


def times_text(spread: Spread | None) -> str:
    """`"1.85×"`; empty where there is none."""
    return "" if spread is None else f"{spread.median:.2f}×"


def spread_texts(spread: Spread | None) -> tuple[str, str]:
    """Smallest to largest, and the interval; empty where there is none."""
    if spread is None:
        return "", ""
    interval = "" if spread.interval is None else f"{spread.interval[0]:.2f}–{spread.interval[1]:.2f}"
    return f"{spread.low:.2f}–{spread.high:.2f}", interval


def speeds(calls: Iterable[CallRecord]) -> dict[int, float]:
    """Tokens per second of each repeat, all its prompts together."""
    tokens: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for call in calls:
        tokens[call.repeat] += call.new_tokens
        seconds[call.repeat] += call.seconds  # type: ignore[assignment]
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens}


def ratio(ours: Sequence[CallRecord], theirs: Sequence[CallRecord]) -> Spread | None:
    """Our speed over theirs: median and spread of the repeats, interval over prompts; `None` without their calls."""
    ours_at, theirs_at = speeds(ours), speeds(theirs)
    repeats = sorted(ours_at.keys() & theirs_at.keys())
    if not repeats:
        return None
    return Spread.over([ours_at[r] / theirs_at[r] for r in repeats], _interval(ours, theirs))


def _interval(ours: Sequence[CallRecord], theirs: Sequence[CallRecord]) -> tuple[float, float] | None:
    """By resampling prompts; `None` of fewer than two."""
    mine, others = per_prompt(ours), per_prompt(theirs)
    names = [name for name in mine if name in others]
    if len(names) < 2:
        return None
    table = np.array([[*mine[name], *others[name]] for name in names])  # (P, 4): tokens, seconds, tokens, seconds
    tokens, seconds, their_tokens, their_seconds = table[drawn_anew(len(names))].sum(1).T  # (4, R)
    return interval_of((tokens / seconds) / (their_tokens / their_seconds))


def per_prompt(calls: Iterable[CallRecord]) -> dict[tuple[str, ...], tuple[float, float]]:
    """Tokens and seconds of each batch of prompts, all repeats together."""
    found: dict[tuple[str, ...], tuple[float, float]] = {}
    for call in calls:
        tokens, seconds = found.get(tuple(call.prompts), (0, 0.0))
        found[tuple(call.prompts)] = (tokens + call.new_tokens, seconds + call.seconds)
    return found


def drawn_anew(count: int) -> np.ndarray:
    """`(R, P)` numbers of `P` prompts drawn anew, the same ones in every call: so ratios compare like with like."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def interval_of(values: np.ndarray) -> tuple[float, float]:
    """The middle 95 %."""
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
