"""Drafts from the text itself: what followed the last time the same few tokens were written. Pure, over token ids.

Costs nothing but the wider forward, and is right where answers quote their prompt or repeat themselves (prompt lookup
decoding, Saxena 2023; transformers' `prompt_lookup_num_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import exp
from operator import mul
from typing import NamedTuple

KEEP = exp(-1.0 / 16.0)
"""What is left of a count after a round: after 16 of them about a third."""

SHORTEST_MATCH, LONGEST_MATCH = 2, 8
"""Last tokens that must have been written before for a lookup, at least, and as many as are compared."""

PLACES_TRIED = 16
"""Earlier places of the last two tokens that are compared; a bound for texts of few different tokens."""


class Lookup(NamedTuple):
    """`tokens` that followed the latest earlier place where the last `match` tokens stood."""

    match: int
    tokens: tuple[int, ...]


NOTHING = Lookup(0, ())


class TextIndex:
    """Where the last two tokens of one growing text stood before. Adding a token and asking take constant time.

    Attributes:
        text: its tokens.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.text: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # pair of tokens -> positions behind it
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            self.text.append(token)
            self._places().append(len(self.text))

    def _places(self) -> list[int]:
        """Positions behind all places of the last tokens, rising."""
        return self._ends[tuple(self.text[-SHORTEST_MATCH:])]

    def lookup(self, length: int) -> Lookup:
        """Up to `length` tokens that followed the longest match among the latest places, the latest of equals first."""
        earlier = self._places()[-1 - PLACES_TRIED : -1]
        if not earlier or length < 1:
            return NOTHING
        match, at = max((self._match_length(end), end) for end in earlier)
        period = len(self.text) - at  # a text that repeats a short run goes on repeating it
        return Lookup(match, tuple(self.text[at + index % period] for index in range(length)))

    def _match_length(self, end: int) -> int:
        text, length, last = self.text, 0, len(self.text)
        while length < LONGEST_MATCH and length < end and text[end - 1 - length] == text[last - 1 - length]:
            length += 1
        return length


class LookupRates:
    """Of tokens that followed an earlier place like the present one, by the length of the match.

    Before anything is known the shortest match is taken to be right every other time, and a longer one the more often:
    as if it had been right once for each of its tokens, and wrong as often as the shortest one.
    """

    def __init__(self) -> None:
        self._right = [0.0] * (LONGEST_MATCH + 1)
        self._tried = [0.0] * (LONGEST_MATCH + 1)

    def reach(self, match: int, length: int) -> list[float]:
        """Chance of each of `length` tokens to be accepted: every right one makes the match longer."""
        known = [min(match + index, LONGEST_MATCH) for index in range(length)]
        rates = [(self._right[n] + n) / (self._tried[n] + n + SHORTEST_MATCH) for n in known]
        return list(accumulate(rates, mul))

    def record(self, match: int, looked_up: Sequence[int], written: Sequence[int]) -> None:
        """Compare a lookup, drafted or not, with what was written."""
        for index, (guess, token) in enumerate(zip(looked_up, written, strict=False)):
            known = min(match + index, LONGEST_MATCH)
            self._right[known] = self._right[known] * KEEP + (guess == token)
            self._tried[known] = self._tried[known] * KEEP + 1.0
            if guess != token:
                return


class RepeatingText:
    """One text: what it offers, and how often that was right.

    Args:
        text: prompt and new tokens so far. They are asked for once: a prompt may lie on a device.
        num_new: how many of them are new.
        rates: how often such offers were right; default: nothing is known.
    """

    def __init__(self, text: Sequence[int], num_new: int, rates: LookupRates | None = None):
        self.index, self.rates = TextIndex(text), rates or LookupRates()
        self.prompt_length = len(text) - num_new
        self.offered, self._num_new = NOTHING, num_new  # before the last round, and how many were new then

    def look_up(self, new: Sequence[int], length: int) -> Lookup:
        """Up to `length` tokens that may follow the `new` ones; asking twice changes nothing."""
        known = self.index.text
        if len(known) > self.prompt_length + len(new):  # memory ran out, and tokens were taken back
            self.index = TextIndex(known[: self.prompt_length])
        self.index.extend(new[len(self.index.text) - self.prompt_length :])
        self.offered, self._num_new = self.index.lookup(length), len(new)
        return self.offered

    def judge(self, new: Sequence[int]) -> None:
        """Compare what was offered, drafted or not, with what was written."""
        if self.offered.tokens:
            self.rates.record(self.offered.match, self.offered.tokens, new[self._num_new :])
        self.offered = NOTHING

    def reach(self, longest: int) -> list[float]:
        """Chance of each of `longest` draft tokens to be accepted; 0 where nothing is offered."""
        offered = self.offered
        known = self.rates.reach(offered.match, len(offered.tokens)) if offered.tokens else []
        return (known + [0.0] * longest)[:longest]
