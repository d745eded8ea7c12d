"""Which combinations the contract is tried on.

Families in `WHOLE` get every combination of the other values; of the other families there are as few combinations as
hold every pair of values once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WHOLE = ("llama", "gemma3")  # full attention everywhere; windowed layers between full ones

Combination = tuple[Any, ...]


def matrix(
    names: Iterable[str], *values: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True
) -> list[Combination]:
    """Combinations `(name, *values)` to try, of those that are `allowed(name, *values)`."""
    names = list(names)
    whole = [name for name in names if name in WHOLE]
    rest = [name for name in names if name not in WHOLE]
    every = [combination for combination in itertools.product(whole, *values) if allowed(*combination)]
    return every + pairwise(rest, *values, allowed=allowed)


def pairwise(*values: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[Combination]:
    """Few combinations, one of each of `values`, that hold every pair that an allowed combination holds.

    Greedy: the next one is the first of those that hold most pairs not held yet.
    """
    left = {
        combination: set(itertools.combinations(enumerate(map(repr, combination)), 2))
        for combination in itertools.product(*values)
        if allowed(*combination)
    }
    wanted = set().union(*left.values())
    chosen = []
    while wanted:
        best = max(left, key=lambda combination: len(left[combination] & wanted))
        wanted -= left.pop(best)
        chosen.append(best)
    return sorted(
        chosen,
        key=lambda combination: [list(map(repr, v)).index(repr(c)) for v, c in zip(values, combination, strict=True)],
    )
