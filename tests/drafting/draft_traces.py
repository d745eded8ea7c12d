"""Texts as drafters meet them: at each position, how many draft tokens would be right. And what a policy makes of one.

A trace knows what every policy could have had, so a policy can be compared with the best fixed length in hindsight.
Seconds are modelled ones: the same costs that the policy is given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

from policy_replay import MACHINES, DraftTrace, Machine

LONGEST = 12

COSTS = {name: MACHINES[name] for name in ("float32", "bfloat16", "card", "graphs")}


@dataclass(frozen=True)
class Trace(DraftTrace):
    """With `phases`: where the text changes."""

    phases: tuple[int, ...] = ()


def bernoulli(rates: Callable[[int], float], length: int, seed: int, phases: Sequence[int] = ()) -> Trace:
    """A drafter whose token at position `t` is right with chance `rates(t)` whatever the draft."""
    dice = random.Random(seed)
    return from_hits([dice.random() < rates(t) for t in range(length)], phases)


def from_hits(hits: Sequence[bool], phases: Sequence[int] = ()) -> Trace:
    """`hits[t]`: whether token `t` is drafted right."""
    right, run = [], 0
    for hit in reversed(hits):
        right.append(run)
        run = min(run + 1, 64) if hit else 0
    return Trace(tuple(reversed(right)), phases=tuple(phases))


def drawn(rate: float, length: int, seed: int) -> Trace:
    """Drafts of a text that is drawn: each token has its own chance, `rate` on average, and the drafter doubts some."""
    dice = random.Random(seed)
    chances = [dice.betavariate(2.0 * rate, 2.0 * (1.0 - rate)) for _ in range(length + LONGEST)]
    right = from_hits([dice.random() < chance for chance in chances]).right[:length]
    sure = [max(0.01, chance**1.5) for chance in chances]
    return Trace(right, tuple(tuple(sure[t : t + LONGEST]) for t in range(length)))


@cache
def recorded(kind: str) -> Trace:
    """What the embedded drafter drafts on texts of a kind (`record_traces.py`); "switching" goes through them all."""
    stored = json.loads(Path(__file__).with_name("recorded_traces.json").read_text(encoding="utf-8"))
    if kind != "switching":
        sure = tuple(tuple(percent / 100 for percent in draft) for draft in stored[kind]["sure"])
        return Trace(tuple(stored[kind]["right"]), sure)
    parts = [recorded(each) for each in stored]
    bounds = list(accumulate(map(len, parts)))
    right, sure = (sum((getattr(part, name) for part in parts), ()) for name in ("right", "sure"))
    return Trace(right, sure, phases=tuple(bounds[:-1]))


RECORDED = ("in domain", "out of domain", "copy-heavy", "code", "switching")


def synthetic(kind: str, length: int = 2000, seed: int = 0) -> Trace:
    """A trace by its name."""
    half = length // 2
    if kind == "good":
        return bernoulli(lambda t: 0.85, length, seed)
    if kind == "middling":
        return bernoulli(lambda t: 0.55, length, seed)
    if kind == "bad":
        return bernoulli(lambda t: 0.03, length, seed)
    if kind == "never":
        return from_hits([False] * length)
    if kind == "always":
        return from_hits([True] * length)
    if kind == "drifting":
        return bernoulli(lambda t: 0.9 - 0.85 * t / length, length, seed, [half])
    if kind == "improving":
        return bernoulli(lambda t: 0.05 + 0.85 * t / length, length, seed, [half])
    if kind == "alternating":
        every = 250
        return bernoulli(lambda t: (0.9, 0.05)[t // every % 2], length, seed, range(every, length, every))
    if kind == "flickering":  # faster than anything can follow
        return from_hits([t // 6 % 2 == 0 for t in range(length)])
    if kind == "collapsing":
        return bernoulli(lambda t: 0.9 if t < half else 0.0, length, seed, [half])
    raise ValueError(kind)


KINDS = (
    "good",
    "middling",
    "bad",
    "never",
    "always",
    "drifting",
    "improving",
    "alternating",
    "flickering",
    "collapsing",
)


def fixed_s(trace: Trace, costs: Machine, depth: int, start: int = 0, end: int | None = None) -> float:
    """Seconds of always drafting `depth` tokens between two positions."""
    at, rounds, end = start, 0, len(trace) if end is None else end
    while at < end:
        at += min(trace.right[at], depth) + 1
        rounds += 1
    return rounds * costs.rounds(LONGEST).speculative_s[depth]


def best_fixed_s(trace: Trace, costs: Machine, start: int = 0, end: int | None = None) -> float:
    """Of the best fixed length in hindsight, none included."""
    return min(fixed_s(trace, costs, depth, start, end) for depth in range(LONGEST + 1))


def oracle_s(trace: Trace, costs: Machine) -> float:
    """Of the best fixed length for each phase."""
    bounds = [0, *trace.phases, len(trace)]
    return sum(best_fixed_s(trace, costs, start, end) for start, end in pairwise(bounds))
