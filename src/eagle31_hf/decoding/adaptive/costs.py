"""What a round costs on one machine, and which draft pays there.

A draft is worth it if the tokens it is expected to bring would take longer than its round at the speed text is written
anyway (the working formula of SpecMQuant, arXiv 2505.22179, with measured seconds for its ratios).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ...errors import ConfigurationError

MOST_TOKENS = 2**31
FEWEST_S, MOST_S = 1e-9, 1e6
"""No clock shows less, and nobody waits for more. Between them nothing that is computed of seconds overflows."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of what rounds are made of.

    Attributes:
        forward_s: of the target over so many tokens at once, as `(width, seconds)`, widths rising from 1.
        drafter_step_s: each draft step behind the first.
        absorb_s: the drafter over the accepted tokens and their hidden states, which gives the first draft token.
        round_s: everything else in a round with drafts; `plain_round_s` in one without.
        resume_s: that the drafter's first draft behind other rounds takes beyond its later ones. By graphs a draft is
            made at the end of the round before, unless that round had none of the drafter's.
        in_buckets: widths between two measured ones cost as much as the wider (graphs of fixed shape).

    Raises:
        ConfigurationError: seconds that no clock can have shown.
    """

    forward_s: tuple[tuple[int, float], ...]
    drafter_step_s: float
    absorb_s: float
    round_s: float = 0.0
    plain_round_s: float = 0.0
    resume_s: float = 0.0
    in_buckets: bool = False

    def __post_init__(self) -> None:
        widths = [width for width, _ in self.forward_s]
        seconds = [s for _, s in self.forward_s]
        others = (self.drafter_step_s, self.absorb_s, self.round_s, self.plain_round_s, self.resume_s)
        if not widths or widths[0] != 1 or any(b <= a for a, b in pairwise(widths)) or widths[-1] > MOST_TOKENS:
            raise ConfigurationError(f"got forwards of widths {widths}; wanted rising widths from 1 on")
        if not all(FEWEST_S <= s <= MOST_S for s in seconds) or not all(0 <= s <= MOST_S for s in others):
            raise ConfigurationError(
                f"got seconds {[*seconds, *others]}; wanted {FEWEST_S} to {MOST_S:,.0f} of a forward, and not more of "
                "anything else"
            )

    def target_s(self, width: int) -> float:
        """The target over `width` tokens; beyond what was measured, as steep as the last stretch."""
        widths = [measured for measured, _ in self.forward_s]
        at = bisect_left(widths, width)
        if at < len(widths) and (widths[at] == width or self.in_buckets):
            return self.forward_s[at][1]
        if len(widths) == 1:
            return self.forward_s[0][1] * width
        (low, low_s), (high, high_s) = self.forward_s[at - 1 : at + 1] if at < len(widths) else self.forward_s[-2:]
        slope = (high_s - low_s) / (high - low)
        if at == len(widths):
            return high_s + (width - high) * max(slope, 0.0)
        return low_s + (width - low) * slope

    def rounds(self, longest: int, *, rows: int = 1, nodes: int | None = None) -> RoundTable:
        """What whole rounds take.

        Args:
            longest: draft.
            rows: that draft together.
            nodes: verified per row where drafts are trees; `None` for chains, verified with their root.
        """
        drafted_s = [self.absorb_s + (depth - 1) * self.drafter_step_s for depth in range(1, longest + 1)]
        verified_s = [self.target_s(rows * (nodes or depth + 1)) + self.round_s for depth in range(1, longest + 1)]
        plain_s = self.target_s(rows) + self.plain_round_s
        return RoundTable(
            speculative_s=(
                plain_s,
                *(drafted + verified for drafted, verified in zip(drafted_s, verified_s, strict=True)),
            ),
            lookup_s=(plain_s, *(self.target_s(rows * (depth + 1)) + self.round_s for depth in range(1, longest + 1))),
            resume_s=self.resume_s,
        )


class RoundTable(NamedTuple):
    """Seconds of rounds by their draft length; the first entries, without a draft, are plain decoding's."""

    speculative_s: tuple[float, ...]
    lookup_s: tuple[float, ...]  # drafts were there already; the drafter reads what was accepted before its next turn
    resume_s: float = 0.0  # as in `RoundCosts`

    @property
    def plain_s(self) -> float:
        return self.speculative_s[0]

    @property
    def reading_s(self) -> float:
        """Of the drafter over what it has missed: as long as over what one round wrote, or nearly."""
        return self.speculative_s[1] - self.lookup_s[1]

    def break_even_tokens(self, depth: int) -> float:
        """Tokens a round must bring a row to be as fast as plain decoding."""
        return self.speculative_s[depth] / self.plain_s

    def marginal_break_even(self, depth: int, speedup: float) -> float:
        """Chance of acceptance from which on the last of `depth` drafts pays, at `speedup` times plain speed."""
        return (self.speculative_s[depth] - self.speculative_s[depth - 1]) * speedup / self.plain_s


class LengthChoice(NamedTuple):
    """`depth` drafts, the tokens a row is expected to get, and how much faster than plain decoding that is."""

    depth: int
    tokens: float
    speedup: float


def expected_tokens(reach: Sequence[float], depth: int) -> float:
    """Of a round with `depth` drafts, the `i`-th accepted with chance `reach[i]`; the target adds one."""
    return 1.0 + sum(reach[:depth])


def choose_length(table: RoundTable, reach: Sequence[float], lengths: Sequence[int]) -> LengthChoice:
    """Of these lengths the one that writes fastest in the long run, the shortest of equals.

    Args:
        reach: chance of each draft position to be accepted, all before it included.
        lengths: candidates, rising, none longer than `reach`.
    """
    tokens = list(accumulate(reach, initial=1.0))
    best = max(lengths, key=lambda depth: tokens[depth] / table.speculative_s[depth])
    return LengthChoice(best, tokens[best], tokens[best] / table.break_even_tokens(best))
