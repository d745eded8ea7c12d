"""The rows of a round, and how their texts choose tokens: what `generate`'s batch and a server's rows both answer.

A round drafts, verifies and accepts in one way. What differs from text to text (greedy or drawn, by which processors,
by whose noise) it asks here. Rows that choose by one rule are handled together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..drafting.host_numbers import on_device
from ..drafting.plan import DraftPlan, ReadTexts
from ..drafting.shape import DraftShape
from ..sampling.callers_code import CallersCode
from ..sampling.draw import argmax, choose, likeliest
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats


class Texts(ReadTexts, Protocol):
    """The texts that rounds write, as far as rounds look into them."""

    @property
    def device(self) -> torch.device:
        """Where their tokens belong."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end texts, behind which no drafts are wanted."""

    def last_token(self, row: int) -> int:
        """Of a text, its prompt's last one if nothing was written."""

    def remaining_tokens(self, row: int) -> int:
        """Tokens a text may still get."""

    def prefix(self, row: int, drafted: Tensor) -> Tensor:
        """Ids `(1, t)` of a text with some `drafted` ones `(n,)` behind it."""


class Choosing(Protocol):
    """Texts, and how they choose their tokens.

    Attributes:
        shape: the largest draft of a round; caches are made for it.
    """

    shape: DraftShape
    stats: SpeculationStats

    @property
    def sequences(self) -> Texts:
        """The texts."""

    @property
    def wants_scores(self) -> bool:
        """Whether scores of the accepted nodes are kept."""

    def choice_rules(self, batch: RoundBatch) -> Sequence[ChoiceRule]:
        """The rules by which the rows choose, each row by one."""

    def noise_for(self, batch: RoundBatch, count: int) -> Tensor | None:
        """Noise `(B, count, V)` of each row's next tokens; `None` where none is drawn."""

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        """Which tokens each row has, `(B, V)`; `None` where no rule asks."""


@dataclass(frozen=True)
class RoundBatch:
    """The rows of a round, as it begins.

    Attributes:
        choosing: the texts.
        rows: which text each row of the caches is.
        live: places in `rows` of those that need tokens; others stand still.
        plan: what to draft; `None` where nothing can be.
    """

    choosing: Choosing
    rows: Sequence[int]
    live: Sequence[int]
    plan: DraftPlan | None = None

    @property
    def sequences(self) -> Texts:
        return self.choosing.sequences

    @cached_property
    def roots(self) -> Tensor:
        """`(B,)` the last token of each row, brought to the device when they are read: graphs have them there."""
        return on_device([self.sequences.last_token(row) for row in self.rows], self.sequences.device)

    @property
    def written(self) -> list[int]:
        """New tokens of each row. One that stands still counts as far as a row that does not: nothing of its noise is
        used, and nothing is made again for it."""
        lengths, live = [len(self.sequences.new[row]) for row in self.rows], set(self.live)
        first = lengths[self.live[0]] if self.live else 0
        return [length if b in live else first for b, length in enumerate(lengths)]

    @property
    def draft_depth(self) -> int:
        """Levels to draft: as planned, and no more than the longest row may get; the target adds a token of its own."""
        if self.plan is None:
            return 0
        remaining = max(self.sequences.remaining_tokens(self.rows[b]) for b in self.live)
        return min(self.plan.shape.depth, remaining - 1)

    @cached_property
    def rules(self) -> Sequence[ChoiceRule]:
        """By which the rows choose, each row by one."""
        return self.choosing.choice_rules(self)

    @property
    def only_rule(self) -> ChoiceRule | None:
        """The rule of all rows, if they choose by one."""
        return self.rules[0] if len(self.rules) == 1 else None


@dataclass(frozen=True)
class ChoiceRule:
    """How some rows of a round choose their tokens.

    Attributes:
        places: of these rows in the round, ascending.
        processing: the target's logits processors.
        draws: tokens are drawn by noise; else the likeliest one is taken.
        rows: by place in the round, which row each is to the processors.
        code: asks processors that keep state, where a round may be repeated.
        ends: `(place, nodes, token)`: whether the text ends with this token after so many accepted nodes; `None`:
            it is cut when it is written.
        fails_alone: what goes wrong with such a row ends no other: where its scores are no numbers it gets the token
            `V`, which is none (`draw.likeliest`), and its processors are asked about drafts by copies alone.
    """

    places: Sequence[int]
    processing: ScoreProcessing
    draws: bool
    rows: Sequence[int]
    code: CallersCode | None = None
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
        return tensor if len(self.places) == tensor.shape[0] else tensor[self.index(tensor.device)]

    def put(self, own: Tensor, whole: Tensor) -> Tensor:
        """A tensor `(B, ...)` with these rows' `own (R, ...)` in their places."""
        return own if len(self.places) == whole.shape[0] else whole.index_copy(0, self.index(whole.device), own)

    def choose(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens `(...)` by processed scores `(..., V)` and, where they are drawn, noise of the same shape."""
        if self.draws:
            assert noise is not None, "some row draws"
            return choose(scores, noise)
        return likeliest(scores) if self.fails_alone else argmax(scores)


def warp_drafts(rules: Sequence[ChoiceRule], scores: Tensor) -> Tensor:
    """Draft scores `(B, S)` by temperature, top-k, top-p and min-p of those drawn rows that have no other
    processors."""
    for rule in rules:
        processing = rule.processing
        if rule.draws and processing.fits_draft_vocabulary and not processing.is_empty:
            scores = rule.put(processing.draft_warping(rule.of(scores)), scores)
    return scores
