"""Which combinations the contract is tried on.

Families in `WHOLE` get every combination of the other values; of all families there are as few combinations as hold
every pair of values once. The latter are tried on the oldest supported transformers, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

WHOLE = ("gemma3",)  # it has layers of both kinds, with full attention and windowed

Combination = tuple[Any, ...]


def matrix(names: Sequence[str], *values: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Parameters `(name, *values)` of a test, of those that are `allowed(name, *values)`."""
    pairs = pairwise(names, *values, allowed=allowed)
    whole = itertools.product([name for name in names if name in WHOLE], *values)
    more = [combination for combination in whole if allowed(*combination) and combination not in set(pairs)]
    return [pytest.param(*combination, marks=pytest.mark.contract) for combination in pairs] + more


def pairwise(*values: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[Combination]:
    """Few combinations, one of each of `values`, that hold every pair that an allowed combination holds.

    Greedy: the next one is the first of those that hold most pairs not held yet.
    """
    left = {
        combination: set(itertools.combinations(enumerate(map(repr, combination)), 2))
        for combination in itertools.product(*values)
        if allowed(*combination)
    }
    wanted, chosen = set().union(*left.values()), []
    while wanted:
        best = max(left, key=lambda combination: len(left[combination] & wanted))
        wanted -= left.pop(best)
        chosen.append(best)
    return chosen
