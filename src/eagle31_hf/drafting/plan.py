"""What to draft next: asked before each round, told after it.

A policy decides length, shape or source of the coming draft from what earlier rounds accepted, never from what the
target is about to say: so the text is the target's own whatever it decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True)
class DraftPlan:
    """What to draft in one round.

    Attributes:
        shape: depth 0 drafts nothing because it would be in vain: one token per row, as plain decoding. What is written
            meanwhile the drafter reads when its turn comes.
        tokens: drafts that are there already instead of the drafter's, one chain for each row that was asked for, of
            any length up to `shape.depth` (prompt lookup).
    """

    shape: DraftShape
    tokens: tuple[tuple[int, ...], ...] | None = None


REST = DraftPlan(DraftShape(depth=0))
"""Draft nothing."""


class DraftPolicy(Protocol):
    """The decisions for one generation; see the module.

    Asked in every round in which something may be drafted. A round that memory failed is asked about again without
    having been recorded: asking twice changes nothing.
    """

    def next_draft(self, rows: Sequence[int], texts: ReadTexts | None, remaining: int) -> DraftPlan:
        """What to draft in the coming round.

        Args:
            rows: of the texts, those that need tokens, in the order of the batch.
            texts: prompts and what was written so far; `None` where a server's batch has a drafter.
            remaining: most tokens that one of these rows may still get.
        """
        ...

    def record(self, plan: DraftPlan, depth: int, rows: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """Learn what became of a plan.

        Args:
            depth: deepest draft position that was verified: the draft may have been shorter (a text's end, doubt).
            rows: that needed tokens.
            accepted: draft tokens that each of them accepted.
            seconds: that the round took; 0 where that was not looked at.
        """
        ...
