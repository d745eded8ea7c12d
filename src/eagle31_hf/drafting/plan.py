"""What to draft next: asked before each round, told after it.

A policy decides length, shape or source of the coming draft from what earlier rounds accepted, never from what the
target is about to say: so the text is the target's own whatever it decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .shape import DraftShape


class ReadTexts(Protocol):
    """The texts of a generation, or of a server, as far as policies look into them."""

    @property
    def new(self) -> Sequence[Sequence[int]]:
        """New tokens of each text."""

    def text(self, row: int) -> Sequence[int]:
        """Prompt and new tokens."""

    def identity(self, row: int) -> Hashable:
        """Which text this is, in every round."""


class RoundState(NamedTuple):
    """What a policy may look at before a round.

    Attributes:
        largest: the largest draft there is room for; a plan that asks for more is cut to it.
        rows: rows of `sequences` that need tokens, in the order of the batch.
        sequences: prompts and what was written so far; not to be changed. `None` where a server's batch has a drafter.
        remaining_tokens: most tokens that one of these rows may still get.
    """

    largest: DraftShape
    rows: Sequence[int]
    sequences: ReadTexts | None
    remaining_tokens: int


@dataclass(frozen=True)
class DraftPlan:
    """What to draft in one round.

    Attributes:
        shape: depth 0 drafts nothing; what is written meanwhile the drafter reads when its turn comes.
        tokens: drafts that are there already instead of the drafter's, one chain per row of `RoundState.rows`, of any
            length up to `shape.depth` (prompt lookup).
        skips: nothing is drafted because it would be in vain (`stats.skipped_rounds` counts these).
    """

    shape: DraftShape
    tokens: tuple[tuple[int, ...], ...] | None = None
    skips: bool = False

    @staticmethod
    def skip() -> DraftPlan:
        """Draft nothing: one token per row, as plain decoding."""
        return _SKIPS


_SKIPS = DraftPlan(DraftShape(depth=0), skips=True)


class RoundStats(NamedTuple):
    """What became of a plan.

    Attributes:
        plan: as it was made; the draft may have been shorter (a text's end, doubt, less memory).
        depth: deepest draft position that was verified.
        rows: rows of the text that needed tokens.
        accepted: draft tokens that each of them accepted.
        seconds: that the round took; 0 where that was not looked at.
    """

    plan: DraftPlan
    depth: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float = 0.0


class DraftPolicy(Protocol):
    """One generation's decisions; see the module.

    Asked in every round in which something may be drafted. A round that memory failed is asked about again without
    having been recorded, so `next_draft` must not count how often it is called.
    """

    def next_draft(self, state: RoundState) -> DraftPlan:
        """What to draft in the coming round."""
        ...

    def record(self, stats: RoundStats) -> None:
        """Learn what became of it."""
        ...
