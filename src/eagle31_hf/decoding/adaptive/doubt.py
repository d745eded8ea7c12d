"""When a draft ends because the drafter doubts it: the least confidence at which one more token pays, found by trying.

How sure a drafter is says which drafts are better, not how good they are: one that is sure of all its tokens by a
twentieth may be right every other time. So the threshold follows what becomes of the drafts it ends. If more of them
are accepted whole than one more token would have to be, it ended them too early.
"""

from __future__ import annotations

from math import exp

STEP = 0.35
"""By how much a draft that was ended too early lowers the logarithm of the threshold, at most."""

BOUNDS = (1e-6, 0.9)


class DoubtThreshold:
    """The confidence below which a draft ends.

    Args:
        cost: of one more draft token, in tokens that could be written instead.
    """

    def __init__(self, cost: float):
        # Drafters are right more often than they think: at first by a square root.
        self.least_confidence = _bounded(_wanted(cost) ** 2)

    def record(self, accepted_whole: bool, cost: float) -> None:
        """Learn what became of a draft that doubt has ended."""
        self.least_confidence = _bounded(self.least_confidence * exp(STEP * (_wanted(cost) - accepted_whole)))


def _wanted(cost: float) -> float:
    """Share of the drafts ended by doubt that should be accepted whole."""
    return min(max(cost, 0.02), 0.98)


def _bounded(confidence: float) -> float:
    return min(max(confidence, BOUNDS[0]), BOUNDS[1])
