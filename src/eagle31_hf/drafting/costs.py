"""What a round costs, in rounds without a draft: by bytes at first, then by the seconds of this process's own rounds.

Over few tokens a forward takes as long as its weights take to be read, so a draft step costs the share of a target's
pass that its bytes are of the target's. A busy machine makes single rounds take many times as long and none shorter, so
of the latest rounds of a kind a fast one counts, not their mean, and few of them are not believed everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from statistics import median

WIDTH, WIDTH_ON_CPU, WIDTH_IN_HALF = 0.035, 0.12, 0.35
"""What each further token of a verification costs before any was timed: by graphs and on a card, by eager code on a
CPU, and there in half precision, which many have no arithmetic for."""

OVERHEAD = 0.05
"""The same of a round with a draft: accepting, and moving what was accepted."""

FEWEST, MANY, LATEST = 2, 8, 48
"""Rounds of a kind before their seconds count, before they are believed whatever they say, and as many as are kept."""

DEAREST_OF_FEW = 2.0
"""By how much fewer than `MANY` rounds may be dearer than by their bytes."""

PLAIN_ROUNDS = (4, 8, 12)
"""Of the first timed rounds, and of those after a renewal, these are to be without a draft until such were timed."""

RENEWED = 256
"""Rounds after which those without a draft are timed anew, and half of those after which seconds are forgotten: what a
machine did in another hour says nothing of lengths that were not drafted since."""

Kind = tuple[bool, int]
"""Whether the drafter drafted, and how many tokens; `(False, n)` were looked up, or none."""

PLAIN: Kind = (False, 0)


class RoundCosts:
    """Costs of the rounds of one kind of batch (its rows; by graphs or eager), for all texts of a process.

    Args:
        share: bytes of weights that a draft step reads over those that the target reads; 0 without a drafter.
        longest: draft.
        width: each further token of a verification, before any was timed.
    """

    def __init__(self, share: float, longest: int, width: float = WIDTH):
        self.share, self.longest, self.width, self._rounds = share, longest, width, 0
        # By kind, lengths together with those up to twice as long: which round, length, seconds over the cost by bytes.
        self._timed: dict[Kind, deque[tuple[int, int, float]]] = {}
        self._tables: dict[bool, list[float]] = {}

    def record(self, kind: Kind, seconds: float) -> None:
        """A round of this kind took so long."""
        self._rounds += 1
        drafts, depth = kind
        alike = self._timed.setdefault((drafts, depth.bit_length()), deque(maxlen=LATEST))
        alike.append((self._rounds, depth, seconds / self._by_bytes(kind)))
        self._tables.clear()

    @property
    def wants_plain(self) -> bool:
        """Whether the next round had better be one without a draft, for its seconds."""
        return self._rounds % RENEWED in PLAIN_ROUNDS and len(self._latest(PLAIN, RENEWED)) < FEWEST

    def _latest(self, kind: Kind, rounds: int) -> list[tuple[int, float]]:
        """Of the last so many rounds those of this kind: length, and seconds over the cost by bytes."""
        timed = list(self._timed.get(kind, ()))  # other threads add to it
        return [(depth, s) for number, depth, s in timed if number > self._rounds - rounds]

    def drafted(self, depth: int) -> float:
        """Of a round in which the drafter drafts so many tokens, 0 for none."""
        return self._table(drafts=True)[min(depth, self.longest)]

    def looked_up(self, depth: int) -> float:
        """Of a round whose draft was there already."""
        return self._table(drafts=False)[min(depth, self.longest)]

    def _table(self, *, drafts: bool) -> list[float]:
        """By draft length, rising: that less work takes longer can only be chance."""
        if (table := self._tables.get(drafts)) is None:
            factors = self._factors(drafts=drafts)
            costs = (self._by_bytes((drafts, depth)) * _between(factors, depth) for depth in range(1, self.longest + 1))
            table = self._tables[drafts] = list(accumulate(costs, max, initial=1.0))
        return table

    def _factors(self, *, drafts: bool) -> list[tuple[float, float]]:
        """How much dearer rounds are than by their bytes, `(depth, factor)`, rising from no draft on."""
        timed = {kind: self._latest(kind, 2 * RENEWED) for kind in list(self._timed)}
        known = {kind: each for kind, each in timed.items() if len(each) >= FEWEST}
        if PLAIN not in known:
            return [(0, 1.0)]
        plain_s = _fast(s for _, s in known.pop(PLAIN))
        alike = {kind: each for kind, each in known.items() if kind[0] is drafts} or known
        points = [(0.0, 1.0)]
        for each in alike.values():
            factor = _fast(s for _, s in each) / plain_s
            depth = median(depth for depth, _ in each)
            points.append((depth, factor if len(each) >= MANY else min(factor, DEAREST_OF_FEW)))
        return sorted(points)

    def _by_bytes(self, kind: Kind) -> float:
        drafts, depth = kind
        return 1.0 + (OVERHEAD + depth * (self.width + self.share * drafts) if depth else 0.0)


def _fast(seconds: Iterable[float]) -> float:
    """What a fifth of them stays below."""
    rising = sorted(seconds)
    return rising[len(rising) // 5]


def _between(points: list[tuple[float, float]], at: int) -> float:
    """On the line through the two nearest points; beyond the last, as there."""
    low, low_y = max(point for point in points if point[0] <= at)
    high, high_y = min((point for point in points if point[0] >= at), default=(low, low_y))
    return low_y if high == low else low_y + (high_y - low_y) * (at - low) / (high - low)
