"""What to draft in a round, decided from what was accepted so far and what rounds cost.

Length, source and rests are one comparison: the tokens that a draft is expected to bring, against those that rounds
without a draft would bring for its cost. What the target is about to say is not known here, so whatever is decided, the
text is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, inf
from operator import mul
from typing import NamedTuple

from .costs import RoundCosts
from .lookup import KEEP, LookupRates, RepeatingText
from .plan import REST, DraftPlan, ReadTexts
from .shape import DraftShape

FIRST_RATE, FIRST_WEIGHT = 0.7, 2.0
"""What is believed of a drafter before it has drafted, worth so many observations: three drafts in vain are enough to
doubt it."""

LOSS = 0.5
"""Tokens lost at which drafting rests if further drafts are expected to bring nothing. Near break-even chance alone
loses some: the smaller the expected slowdown, the more are borne."""

MOST_LOST = 1.5
"""The same of drafts that have won nothing yet, whatever is expected of them."""

SHORTEST_REST, LONGEST_REST = 8, 48
"""Tokens of a row before drafting is tried again, at first and at most; each trial in vain doubles them."""

VAIN_ROUNDS = 8
"""Rounds in a row without an accepted token after which `"constant"` rests."""

DOUBT_STEP = 0.35
"""By how much a draft that doubt ended too early lowers the logarithm of the doubt that ends one, at most."""

PID_GAIN = 0.15
"""Of the integral, and of the measured value's smoothing; the two other gains are 1."""


class DraftRates:
    """How likely the drafter's next draft is accepted, position by position, from counts that fade: texts change.

    Args:
        depth: longest draft.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self._accepted, self._reached = [0.0] * depth, [0.0] * depth
        self._reach: list[float] | None = None

    def reach(self) -> list[float]:
        """Chance of each position to be accepted, all before it included."""
        if self._reach is None:
            # Positions that were not tried lately are taken to have the rate of all.
            overall = (sum(self._accepted) + FIRST_RATE * FIRST_WEIGHT) / (sum(self._reached) + FIRST_WEIGHT)
            base = overall * FIRST_WEIGHT
            each = zip(self._accepted, self._reached, strict=True)
            self._reach = list(accumulate(((a + base) / (r + FIRST_WEIGHT) for a, r in each), mul))
        return self._reach

    def record(self, drafted: int, accepted: Sequence[int]) -> None:
        """One round: `drafted` tokens per row, of which each row accepted so many."""
        drafted = min(drafted, self.depth)
        if not drafted:
            return
        self._accepted = [count * KEEP for count in self._accepted]
        self._reached = [count * KEEP for count in self._reached]
        self._reach = None
        for row in accepted:
            for position in range(min(drafted, row + 1)):
                self._reached[position] += 1.0
                self._accepted[position] += position < row


class Steering(NamedTuple):
    """A PID controller's state: the `length` before rounding, its `integral`, how often drafts are accepted `whole`."""

    length: float
    integral: float
    whole: float | None = None


def steer(state: Steering, whole: float, wanted: float, longest: int) -> Steering:
    """The length by a PID controller that keeps drafts accepted whole as often as their last token pays.

    The integral stops at the bounds (anti-windup), and the derivative looks at the measured value alone, so that a new
    set point makes no jump. The error is a share of the way to the end of the scale: set points near 0 or 1 steer as
    quickly in both directions.

    Args:
        whole: share of the rows that accepted the last draft whole.
        wanted: chance from which on the last token pays, above 0 and below 1.
    """
    before = wanted if state.whole is None else state.whole
    smoothed = before + PID_GAIN * (whole - before)
    error = (smoothed - wanted) / (1.0 - wanted if smoothed > wanted else wanted)
    integral = min(max(state.integral + PID_GAIN * error, 1.0), float(longest))
    length = min(max(integral + error - (smoothed - before), 1.0), float(longest))
    return Steering(length, integral, smoothed)


class Planner:
    """The decisions for one text, or for a batch whose rows share their rounds (`plan.DraftPolicy`).

    Args:
        shape: the largest draft.
        costs: of rounds, by the number of rows that need tokens.
        schedule: `"planned"`, `"constant"` or `"pid"`.
        lengths: of chains that may be drafted; default: all up to `shape`. By graphs each is a graph of its own.
        start: draft tokens that `"pid"` begins with; default: the longest.
        has_drafter: without one, drafts come from the texts alone.
        on_event: called with `"rest"` or `"resume"`, and why.
    """

    def __init__(
        self,
        shape: DraftShape,
        costs: Callable[[int], RoundCosts],
        *,
        schedule: str = "planned",
        lengths: Sequence[int] = (),
        start: int | None = None,
        has_drafter: bool = True,
        on_event: Callable[[str, str], None] | None = None,
    ):
        self.shape, self.schedule, self._costs_of, self.costs = shape, schedule, costs, costs(1)
        self._has_drafter, self._on_event = has_drafter, on_event or (lambda _what, _why: None)
        self._lengths = lengths or range(1, shape.depth + 1)
        self._is_constant = schedule == "constant"
        self.rates, self._lookup_rates = DraftRates(shape.depth), LookupRates()
        first = float(min(start or shape.depth, shape.depth))
        self._steering = Steering(first, first)
        self._rows = 1
        self._doubt: float | None = None  # least confidence of a draft that goes on
        self._won, self._paid = 8.0, 8.0  # tokens of the drafter's rounds lately, and their costs
        self._rest_left, self._next_rest = 0, SHORTEST_REST
        self._lost, self._has_won, self._is_trial = 0.0, False, False
        self._texts: dict[Hashable, RepeatingText] = {}  # that drafts may be looked up in
        self._asked: ReadTexts | None = None

    # --- before a round -------------------------------------------------------------------------------------------

    def next_draft(self, rows: Sequence[int], texts: ReadTexts | None, remaining: int) -> DraftPlan:
        """What to draft in the coming round."""
        self._rows = len(rows)
        self.costs = self._costs_of(self._rows)
        times_plain = self.costs.wants_plain and not self._is_constant
        depth = 0 if self.rests or times_plain else self._next_length()
        chances = self._look_up(rows, texts, remaining)
        if any(chances):
            length, lead = self._best_lookup(chances)
            if lead > self._tokens(depth) - self._speed() * self.costs.drafted(depth):
                tokens = tuple(text.offered.tokens[:length] for text in self._texts.values())
                return DraftPlan(DraftShape(length), tokens)
        return DraftPlan(self._shape(depth)) if depth else REST

    @property
    def rests(self) -> bool:
        """Whether the drafter is not asked for now."""
        return self._rest_left > 0 or not self._has_drafter

    def shorten_rest(self) -> None:
        """Try the drafter soon: another text has joined, which may be of another kind."""
        self._rest_left = min(self._rest_left, SHORTEST_REST)

    def _next_length(self) -> int:
        """Of the drafter's next draft: the shortest where little speaks for it."""
        is_free = not self.shape.is_tree and not self._is_constant
        return self._lengths[0] if self._is_trial and is_free else self._length()

    def _length(self) -> int:
        if self.shape.is_tree or self._is_constant:
            return self.shape.depth
        if self.schedule == "pid":
            longest = round(self._steering.length)
            return max((each for each in self._lengths if each <= longest), default=self._lengths[0])
        if self._doubts:
            return self.shape.depth
        return max(self._lengths, key=lambda depth: self._tokens(depth) / self.costs.drafted(depth))

    def _shape(self, depth: int) -> DraftShape:
        """A chain of so many tokens, which ends earlier where the drafter doubts it."""
        shape = self.shape.cut_to(depth)
        if not self._doubts:
            return replace(shape, min_confidence=0.0) if shape.min_confidence else shape
        if self.schedule != "planned":
            return shape
        return replace(shape, min_confidence=max(shape.min_confidence, self._least_confidence()))

    @property
    def _doubts(self) -> bool:
        """Whether doubt ends drafts: a single row's."""
        return self.shape.min_confidence > 0.0 and self._rows == 1

    def _tokens(self, depth: int) -> float:
        """Expected of a round with a draft of the drafter's."""
        return 1.0 + sum(self.rates.reach()[:depth])

    def _speedup(self) -> float:
        """Expected of drafts over plain decoding; where doubt ends them, as it was lately."""
        if self._doubts:
            return self._won / self._paid
        length = self._length()
        return self._tokens(length) / self.costs.drafted(length)

    def _speed(self) -> float:
        """Of writing on, over plain decoding."""
        return 1.0 if self.rests else max(self._speedup(), 1.0)

    # --- drafts from the text itself ------------------------------------------------------------------------------

    def _look_up(self, rows: Sequence[int], texts: ReadTexts | None, remaining: int) -> list[float]:
        """Chance of each token that the texts offer; nothing where a drafter drafts for several rows."""
        self._asked = texts
        if texts is None or self._is_constant or (self._has_drafter and len(rows) > 1):
            self._texts = {}
            return []
        # Only these are kept: texts that have left are forgotten.
        self._texts = {texts.identity(row): self._text(texts, row) for row in rows}
        longest = min(self.shape.nodes, remaining) - 1
        for text, row in zip(self._texts.values(), rows, strict=True):
            text.look_up(texts.new[row], longest)
        by_row = zip(*(text.reach(longest) for text in self._texts.values()), strict=True)
        return [sum(chances) / len(rows) for chances in by_row]

    def _text(self, texts: ReadTexts, row: int) -> RepeatingText:
        known = self._texts.get(texts.identity(row))
        rates = self._lookup_rates if self._has_drafter else None
        return known or RepeatingText(texts.text(row), len(texts.new[row]), rates)

    def _best_lookup(self, chances: Sequence[float]) -> tuple[int, float]:
        """Length, and how many tokens it is ahead of writing on at the present speed."""
        tokens, speed = accumulate(chances, initial=1.0), self._speed()
        ahead = [each - speed * self.costs.looked_up(depth) for depth, each in enumerate(tokens)][1:]
        return ahead.index(max(ahead)) + 1, max(ahead)

    # --- after a round --------------------------------------------------------------------------------------------

    def record(self, plan: DraftPlan, depth: int, rows: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """Learn what became of a plan."""
        tokens = 1.0 + sum(accepted) / len(accepted)
        drafted = depth if plan.tokens is None else 0
        if seconds > 0.0:
            self.costs.record((drafted > 0, depth), seconds)
        self._judge_lookups(rows)
        if drafted:
            self._record_drafts(plan.shape, drafted, accepted, tokens)
        elif self._rest_left > 0:
            self._rest_left = max(self._rest_left - round(tokens), 0)

    def _judge_lookups(self, rows: Sequence[int]) -> None:
        if self._asked is None:
            return
        for row in rows:
            if (text := self._texts.get(self._asked.identity(row))) is not None:
                text.judge(self._asked.new[row])

    def _record_drafts(self, shape: DraftShape, drafted: int, accepted: Sequence[int], tokens: float) -> None:
        cost = self.costs.drafted(drafted)
        self._won, self._paid = self._won * KEEP + tokens, self._paid * KEEP + cost
        if shape.min_confidence and drafted < shape.depth:
            self._learn_doubt(max(accepted) >= drafted)
        self.rates.record(drafted, accepted)
        if self.schedule == "pid" and drafted >= min(shape.depth, self._length()):
            whole = sum(row >= drafted for row in accepted) / len(accepted)
            self._steering = steer(self._steering, whole, self._wanted(), self.shape.depth)
        if self._is_constant:
            self._lost = 0.0 if any(accepted) else self._lost + LOSS / VAIN_ROUNDS
            has_won, is_lost = any(accepted), self._lost >= (LOSS / VAIN_ROUNDS if self._is_trial else LOSS)
        else:
            self._lost += cost - tokens
            has_won, is_lost = self._lost < 0.0, self._lost >= self._bearable_loss()
        if is_lost:
            self._rest()
        elif has_won:
            self._win()

    def _bearable_loss(self) -> float:
        """Tokens that drafts may lose before a rest; those behind a rest may lose none."""
        if self._is_trial:
            return 0.0
        speedup = self._speedup()
        bearable = LOSS / (1.0 - speedup) if speedup < 1.0 else inf
        return bearable if self._has_won else min(bearable, MOST_LOST)

    def _rest(self) -> None:
        self._on_event("rest", self._why_rest())
        self._rest_left, self._lost, self._has_won, self._is_trial = self._next_rest, 0.0, False, True
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)

    def _why_rest(self) -> str:
        if self._is_constant:
            return f"nothing was accepted in {VAIN_ROUNDS} rounds in a row" + ", nor in a trial since" * self._is_trial
        if (speedup := self._speedup()) < 1.0:
            return f"by an estimate, drafts would slow the text down to {speedup:.2f} of its speed without them"
        return f"{'a trial' if self._is_trial else 'its first drafts'} brought less than they cost, by an estimate"

    def _win(self) -> None:
        if self._is_trial:
            self._won, self._paid = 8.0, 8.0
            self._on_event("resume", "drafts pay again")
        self._lost, self._has_won, self._is_trial, self._next_rest = 0.0, True, False, SHORTEST_REST

    # --- doubt, and what one more token must bring -----------------------------------------------------------------

    def _wanted(self) -> float:
        """Chance from which on one more draft token pays at the present speed."""
        longest = self.shape.depth
        each = (self.costs.drafted(longest) - self.costs.drafted(1)) / max(longest - 1, 1)
        return min(max(each * self._speed(), 0.02), 0.98)

    def _least_confidence(self) -> float:
        """Below which a draft ends. Drafters are right more often than they think: at first by a square root."""
        return min(self._wanted() ** 2, 0.9) if self._doubt is None else self._doubt

    def _learn_doubt(self, accepted_whole: bool) -> None:
        """Drafts that doubt ends should be accepted whole as often as one more token would have to be."""
        changed = self._least_confidence() * exp(DOUBT_STEP * (self._wanted() - accepted_whole))
        self._doubt = min(max(changed, 1e-6), 0.9)
