"""Drafters against each other on the same texts: acceptance lengths, and how sure their differences are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..training.distillation.known_texts import TextRounds, acceptance_length
from ..trees.shape import DraftShape
from .ratios import drawn_anew, interval_of


@dataclass(frozen=True)
class DrafterAcceptance:
    """One drafter in one setting.

    Attributes:
        name: as it was given.
        temperature: of serving.
        draft_tokens, tree_width, tree_size: of the drafts; width 1 is a chain.
        length: acceptance length, its middle 95 % over prompts in `interval`.
        by_category: acceptance length of each kind of prompt.
        accepted_at: per level, the share of the rounds that draft it in which it is accepted.
        ratio, ratio_interval: to the first drafter on the same texts; `None` for the first.
        seconds: its passes over the texts took.
    """

    name: str
    temperature: float
    draft_tokens: int
    tree_width: int
    tree_size: int
    length: float
    interval: tuple[float, float]
    by_category: dict[str, float]
    accepted_at: tuple[float, ...]
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    seconds: float


def acceptance_of(
    name: str,
    temperature: float,
    shape: DraftShape,
    rounds: Sequence[TextRounds],
    first: Sequence[TextRounds] | None,
    seconds: float,
) -> DrafterAcceptance:
    """Figures of a drafter's `rounds`, beside those of the `first` drafter on the same texts.

    Args:
        first: `None` if it is the first itself.
    """
    length, draws = acceptance_length(rounds), _draws(rounds)
    categories = dict.fromkeys(text.category for text in rounds)
    drafted, accepted = (
        np.array([getattr(text, at) for text in rounds]).sum(0) for at in ("drafted_at", "accepted_at")
    )
    return DrafterAcceptance(
        name=name,
        temperature=temperature,
        draft_tokens=shape.depth,
        tree_width=shape.top_k,
        tree_size=shape.nodes,
        length=length,
        interval=interval_of(draws),
        by_category={kind: acceptance_length([t for t in rounds if t.category == kind]) for kind in categories},
        accepted_at=tuple((accepted / np.maximum(drafted, 1e-12)).tolist()),
        ratio=None if first is None else length / acceptance_length(first),
        ratio_interval=None if first is None else interval_of(draws / _draws(first)),
        seconds=seconds,
    )


def _draws(rounds: Sequence[TextRounds]) -> np.ndarray:
    """`(R,)` acceptance lengths of prompts drawn anew, the same ones in every call."""
    table = np.array([(text.tokens, text.rounds) for text in rounds])  # (P, 2)
    tokens, taken = table[drawn_anew(len(table))].sum(1).T
    return tokens / taken
