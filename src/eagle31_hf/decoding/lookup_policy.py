"""A `DraftPolicy` for a target without a drafter: drafts are what followed the last time the same tokens were written.

Texts that share their rounds share a draft's length. It is the one that is expected to bring the most tokens beyond
what its wider forward costs; where none brings any, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate

from ..drafting.lookup import RepeatingText
from ..drafting.plan import DraftPlan, DraftPolicy, ReadTexts, RoundState, RoundStats
from ..trees.shape import DraftShape
from .adaptive.costs import RoundCosts, RoundTable


class LookupPolicy(DraftPolicy):
    """Drafts from the texts themselves.

    Args:
        costs: what forwards take, in whatever unit.
        longest: draft.
    """

    def __init__(self, costs: RoundCosts, longest: int):
        self._costs, self.longest = costs, longest
        self._texts: dict[Hashable, RepeatingText] = {}
        self._asked: ReadTexts | None = None
        self._tables: dict[int, RoundTable] = {}  # by number of rows

    def next_draft(self, state: RoundState) -> DraftPlan:
        """What the texts offer, or nothing."""
        assert state.sequences is not None, "texts are looked at"
        self._asked = texts = state.sequences
        new = texts.new
        # Only these are kept: texts that have left are forgotten.
        self._texts = {texts.identity(row): self._known(texts, row) for row in state.rows}
        longest = min(self.longest, state.largest.depth, state.remaining_tokens - 1)
        offers = [text.look_up(new[row], longest) for text, row in zip(self._texts.values(), state.rows, strict=True)]
        depth = self._best_length(longest)
        tokens = tuple(offer.tokens[:depth] for offer in offers)
        return DraftPlan(DraftShape(depth), tokens=tokens) if depth else DraftPlan(DraftShape(0))

    def _known(self, texts: ReadTexts, row: int) -> RepeatingText:
        known = self._texts.get(texts.identity(row))
        return known or RepeatingText(texts.text(row), len(texts.new[row]))

    def record(self, stats: RoundStats) -> None:
        """Compare what was offered with what was written."""
        assert self._asked is not None, "asked before"
        for row in stats.rows:
            if (text := self._texts.get(self._asked.identity(row))) is not None:
                text.judge(self._asked.new[row])

    def _best_length(self, longest: int) -> int:
        """The draft that is most tokens ahead of writing on one by one, 0 if none is."""
        rows = len(self._texts)
        reach = [sum(chances) / rows for chances in zip(*(t.reach(longest) for t in self._texts.values()), strict=True)]
        table = self._table(rows)
        ahead = [
            tokens - seconds / table.plain_s
            for tokens, seconds in zip(accumulate(reach, initial=1.0), table.lookup_s, strict=False)
        ]
        return ahead.index(max(ahead))

    def _table(self, rows: int) -> RoundTable:
        if rows not in self._tables:
            self._tables[rows] = self._costs.rounds(self.longest, rows=rows)
        return self._tables[rows]
