"""How the texts of a round choose their tokens: what `generate`'s batch and a server's rows both answer.

A round drafts, verifies and accepts in one way. What differs from text to text (greedy or drawn, by which processors,
by whose noise) it asks here. Rows that choose by one rule are handled together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..compiled.graph_makers import GraphMaker
from ..sampling.asked_once import AskedOnce
from ..sampling.draw import argmax, choose, likeliest
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from ..trees.host_numbers import on_device
from ..trees.shape import DraftShape
from .round import RoundBatch


@dataclass(frozen=True)
class ChoiceRule:
    """How some rows of a round choose their tokens.

    Attributes:
        places: of these rows in the round, ascending.
        processing: the target's logits processors.
        draws: tokens are drawn by noise; else the likeliest one is taken.
        rows: by place in the round, which row each is to the processors.
        asked: what processors that keep state have said of prefixes, where a round may be repeated.
        ends: `(place, nodes, token)`: whether the text ends with this token after so many accepted nodes; `None`:
            whoever writes the text cuts it.
        fails_alone: what goes wrong with such a row ends no other: where its scores are no numbers it gets the token
            `V`, which is none (`draw.likeliest`), and its processors are asked about drafts by copies alone.
    """

    places: Sequence[int]
    processing: ScoreProcessing
    draws: bool
    rows: Sequence[int]
    asked: AskedOnce | None = None
    ends: Callable[[int, int, int], bool] | None = None
    fails_alone: bool = False
    _indices: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def index(self, device: torch.device) -> Tensor:
        """Its places on a device, where they are brought once."""
        if device not in self._indices:
            self._indices[device] = on_device(list(self.places), device)
        return self._indices[device]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor `(B, ...)`."""
        return tensor if len(self.places) == len(tensor) else tensor[self.index(tensor.device)]

    def choose(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens `(...)` by processed scores `(..., V)` and, where they are drawn, noise of the same shape."""
        if self.draws:
            assert noise is not None, "some row draws"
            return choose(scores, noise)
        return likeliest(scores) if self.fails_alone else argmax(scores)

    def keep(self, places: Sequence[int], lengths: Sequence[int], tokens: list[int]) -> list[int]:
        """`tokens` chosen after prefixes of these lengths; those chosen before where somebody may have seen them."""
        if self.asked is None or not self.processing.in_order:
            return tokens
        rows = [self.rows[b] for b in places]
        return [self.asked.choose(*each) for each in zip(rows, lengths, tokens, strict=True)]


class Choosing(Protocol):
    """What rounds ask of the texts they write, beside what is in a `RoundBatch`.

    Attributes:
        shape: the largest draft of a round; caches are made for it.
        graph_maker: where graphs come from that are not there yet, if rounds are computed by graphs; `None`: they are
            captured or compiled at once.
        wants_scores: somebody keeps scores of the accepted nodes.
    """

    shape: DraftShape
    stats: SpeculationStats
    graph_maker: GraphMaker | None

    @property
    def wants_scores(self) -> bool: ...

    def choice_rules(self, batch: RoundBatch) -> Sequence[ChoiceRule]:
        """The rules by which the rows choose, each row by one."""

    def noise_for(self, batch: RoundBatch, count: int, *, behind: int = 0) -> Tensor | None:
        """Noise `(B, count, V)` of each row's tokens, from so many behind its end on; `None` where none is drawn."""

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        """Which tokens each row has, `(B, V)`; `None` where no rule asks."""


def only_one(rules: Sequence[ChoiceRule]) -> ChoiceRule | None:
    """The rule of all rows, if these are no more."""
    return rules[0] if len(rules) == 1 else None


def warp_drafts(rules: Sequence[ChoiceRule], scores: Tensor) -> Tensor:
    """Draft scores `(B, S)` by temperature, top-k, top-p and min-p of those drawn rows that have no other
    processors."""
    for rule in rules:
        processing = rule.processing
        if rule.draws and processing.fits_draft_vocabulary and not processing.is_empty:
            index = rule.index(scores.device)
            scores = scores.index_copy(0, index, processing.draft_warping(scores[index]))
    return scores
