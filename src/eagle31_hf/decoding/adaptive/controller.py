"""One generation's drafting: its length, its source, or a rest, decided before each round and learnt from after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from ...drafting.lookup import NOTHING, Lookup
from ...drafting.rates import LookupRates
from .acceptance_rates import KEEP, MEMORY, AcceptanceRates, Prior
from .costs import LengthChoice, RoundTable, choose_length, expected_tokens
from .doubt import DoubtThreshold
from .guard import CollapseGuard, GuardState
from .schedules import LengthSchedule


class Source(Enum):
    """Where a round's drafts come from."""

    DRAFTER = "drafter"
    LOOKUP = "prompt lookup"
    NOTHING = "nothing"


class Decision(NamedTuple):
    """What to draft: up to `depth` tokens, fewer once the drafter is less sure of them all than `min_confidence`.

    Or nothing, and perhaps to judge the drafter by what it would have drafted while it rested (`looks_back`).
    """

    source: Source
    depth: int = 0
    min_confidence: float = 0.0
    looks_back: bool = False


class RealisedSpeed:
    """Tokens that the drafter's rounds wrote, over what plain decoding would have, in as many as are remembered."""

    def __init__(self, expected: float):
        self._tokens, self._plain_tokens = expected * MEMORY, MEMORY

    def record(self, tokens: float, plain_tokens: float) -> None:
        """One round."""
        self._tokens = self._tokens * KEEP + tokens
        self._plain_tokens = self._plain_tokens * KEEP + plain_tokens

    @property
    def speedup(self) -> float:
        return self._tokens / self._plain_tokens


class DraftController:
    """Decides round by round.

    Args:
        table: what rounds take on this machine, for the models at work.
        schedule: of draft lengths, none beyond the table.
        prior: what earlier generations say of the drafter.
        asks_confidence: whether reading the drafter's confidence costs nothing: a draft may then be as long as any, and
            ends where the drafter is less sure of it than pays.
        on_event: told what changed and why.
    """

    def __init__(
        self,
        table: RoundTable,
        schedule: LengthSchedule,
        *,
        prior: Prior | None = None,
        asks_confidence: bool = False,
        on_event: Callable[[str, str], None] | None = None,
    ):
        self.table, self.schedule = table, schedule
        self._choice: tuple[Sequence[float], LengthChoice] | None = None  # expected of drafts by some reach
        self.longest = len(table.speculative_s) - 1
        self.rates = AcceptanceRates(self.longest, prior)
        self.lookup_rates = LookupRates()
        self._on_event = on_event or (lambda _what, _why: None)
        self._source = Source.NOTHING  # of the last round's drafts
        expected = self._expected()
        self._realised = RealisedSpeed(max(expected.speedup, 1.0))
        self.doubt = DoubtThreshold(self._further_token_s()) if asks_confidence else None
        self.guard = CollapseGuard(starts_resting=expected.speedup < 1.0)
        if self.guard.rests:
            self._tell("rest", "as in earlier texts")

    def use(self, table: RoundTable, schedule: LengthSchedule) -> None:
        """Decide by these from now on: rounds are shared by another number of rows. Neither is longer than before."""
        self.table, self.schedule, self._choice = table, schedule, None

    def decide(self, lookup: Lookup = NOTHING) -> Decision:
        """What to draft next; asking twice changes nothing.

        Args:
            lookup: what the text itself offers.
        """
        drafter = self._drafter_decision()
        if not lookup.tokens:
            return drafter
        length, lead = self._best_lookup(lookup)
        return Decision(Source.LOOKUP, length) if lead > self._lead(drafter) else drafter

    def record(self, decision: Decision, drafted: int, accepted: Sequence[int]) -> None:
        """Learn what became of a decision.

        Args:
            drafted: tokens drafted one after the other, at least as many as any row accepted.
            accepted: by each row that needed tokens.
        """
        tokens, self._source = 1.0 + sum(accepted) / len(accepted), decision.source
        if decision.source is Source.DRAFTER and drafted:
            self._record_drafts(drafted, accepted, tokens)
        else:
            self.guard.record_rest(round(tokens))

    def record_hindsight(self, positions: int, accepted: int) -> None:
        """Learn whether a rest had better end.

        Args:
            positions: of the text at which the drafter was judged; 0: nothing could be said, so it is tried.
            accepted: first draft tokens that the target would have kept there.
        """
        self.rates.begin_anew(positions, accepted)
        if not positions:
            self.guard.record_judgement(is_promising=True)
            return
        is_promising = accepted > 0 and self._expected().speedup >= 1.0  # what knows nothing may be cheap
        self.guard.record_judgement(is_promising=is_promising, knows_nothing=not accepted)

    # --- the drafter ---------------------------------------------------------------------------------------------

    def _drafter_decision(self) -> Decision:
        if self.guard.rests:
            return Decision(Source.NOTHING, looks_back=self.guard.state is GuardState.JUDGING)
        if self.doubt is None:
            return Decision(Source.DRAFTER, self.schedule.length(self.rates.reach()))
        return Decision(Source.DRAFTER, self.longest, self.doubt.least_confidence)

    def _further_token_s(self) -> float:
        """What one more draft token costs, in plain tokens at the present speed."""
        if self.longest < 2:
            return 1.0
        shortest_s, *_, longest_s = self.table.speculative_s[1:]
        return (longest_s - shortest_s) / (self.longest - 1) / self.table.plain_s * self._speedup()

    def _speedup(self) -> float:
        """Of writing now, over plain decoding."""
        return max(self._realised.speedup, 1.0)

    def _expected(self) -> LengthChoice:
        """Of drafts as long as the schedule makes them."""
        reach = self.rates.reach()
        if self._choice is None or self._choice[0] is not reach:
            self._choice = reach, choose_length(self.table, reach, (self.schedule.length(reach),))
        return self._choice[1]

    def _record_drafts(self, drafted: int, accepted: Sequence[int], tokens: float) -> None:
        plain_tokens = self.table.break_even_tokens(drafted)
        self._realised.record(tokens, plain_tokens)
        before = self._expected().depth
        self.rates.record(drafted, accepted)
        self.schedule.record(drafted, accepted, self.rates.reach())
        if self.doubt is not None and drafted < self.longest:
            self.doubt.record(max(accepted) >= drafted, self._further_token_s())
        expected = self._expected()
        if expected.depth != before and self.doubt is None:
            self._tell("length", f"{before} to {expected.depth} tokens")
        speedup = expected.speedup if self.doubt is None else self._realised.speedup
        state = self.guard.record_drafts(tokens - plain_tokens, speedup)
        if state is GuardState.RESTING:
            self._tell("rest", f"drafts would write {speedup:.2f} x as fast as none")
        elif state is GuardState.DRAFTING:
            self._realised = RealisedSpeed(max(expected.speedup, 1.0))
            self._tell("resume", "drafts pay again")

    def _tell(self, what: str, why: str) -> None:
        self._on_event(what, f"{why}; a draft token is accepted {self.rates.overall():.0%} of the time")

    # --- prompt lookup -------------------------------------------------------------------------------------------

    def _best_lookup(self, lookup: Lookup) -> tuple[int, float]:
        """Length, and how many tokens it is ahead of writing on at the present speed."""
        reach = self.lookup_rates.reach(lookup.match, min(len(lookup.tokens), self.longest))
        ahead = [
            tokens - self._tokens_of(seconds + self._return_s() * (1.0 - right))
            for tokens, right, seconds in zip(
                accumulate(reach, initial=1.0), (0.0, *reach), self.table.lookup_s, strict=False
            )
        ][1:]
        return ahead.index(max(ahead)) + 1, max(ahead)

    def _lead(self, drafter: Decision) -> float:
        """The same of what the drafter would do."""
        if drafter.source is Source.NOTHING:
            return 1.0 - self._speedup()
        if self.doubt is not None:
            return 0.0  # the present speed is the drafter's
        tokens = expected_tokens(self.rates.reach(), drafter.depth)
        resume_s = 0.0 if self._source is Source.DRAFTER else self.table.resume_s
        return tokens - self._tokens_of(self.table.speculative_s[drafter.depth] + resume_s)

    def _return_s(self) -> float:
        """What it takes to have the drafter draft again behind a lookup that was not right to its end."""
        return 0.0 if self.guard.rests else self.table.resume_s

    def _tokens_of(self, seconds: float) -> float:
        """Written in that time at the present speed."""
        return self._speedup() * seconds / self.table.plain_s
