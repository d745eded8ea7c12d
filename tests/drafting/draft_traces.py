"""Texts as drafters meet them: at each position, how many draft tokens would be right. And what a policy makes of one.

A trace knows what every policy could have had, so a policy can be compared with the best fixed length in hindsight.
Seconds are modelled ones: the same costs that the policy is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from policy_replay import MACHINES, DraftTrace, Machine, read_kept

LONGEST = 12

COSTS = {name: MACHINES[name] for name in ("float32", "bfloat16", "card", "graphs")}


def bernoulli(rates: Callable[[int], float], length: int, seed: int) -> DraftTrace:
    """A drafter whose token at position `t` is right with chance `rates(t)` whatever the draft."""
    dice = random.Random(seed)
    right, run = [], 0
    for hit in reversed([dice.random() < rates(t) for t in range(length)]):
        right.append(run)
        run = min(run + 1, 64) if hit else 0
    return DraftTrace(tuple(reversed(right)))


def recorded(kind: str) -> list[DraftTrace]:
    """What the trained drafter drafts on texts of a kind, in which nothing is looked up."""
    texts, _ = read_kept()
    return [DraftTrace(text.right, text.sure) for text in texts if (text.drafter, text.kind) == ("trained", kind)]


RECORDED = ("domain", "other", "code", "copy")


KINDS: dict[str, Callable[[int, int], float]] = {
    "good": lambda t, length: 0.85,
    "middling": lambda t, length: 0.55,
    "bad": lambda t, length: 0.03,
    "never": lambda t, length: 0.0,
    "always": lambda t, length: 1.0,
    "drifting": lambda t, length: 0.9 - 0.85 * t / length,
    "improving": lambda t, length: 0.05 + 0.85 * t / length,
    "alternating": lambda t, length: (0.9, 0.05)[t // 250 % 2],
    "flickering": lambda t, length: float(t // 6 % 2 == 0),  # faster than anything can follow
    "collapsing": lambda t, length: 0.9 if t < length // 2 else 0.0,
}
"""Chance of each token of a text to be drafted right."""


def synthetic(kind: str, length: int = 2000, seed: int = 0) -> DraftTrace:
    """A trace by its name."""
    return bernoulli(lambda t: KINDS[kind](t, length), length, seed)


def fixed_s(trace: DraftTrace, costs: Machine, depth: int) -> float:
    """Seconds of always drafting `depth` tokens."""
    at = rounds = 0
    while at < len(trace):
        at += min(trace.right[at], depth) + 1
        rounds += 1
    return rounds * costs.seconds(depth)


def best_fixed_s(traces: Sequence[DraftTrace], costs: Machine) -> float:
    """Of the best fixed length in hindsight, none included, for all of them."""
    return min(sum(fixed_s(trace, costs, depth) for trace in traces) for depth in range(LONGEST + 1))
