"""Whether a drafter that rests would have been right: its first draft token at positions whose text is known by now.

A rest ends with the drafter reading what it missed. That pass says what it would have drafted first behind each of
those positions, and the target has written since what had to be drafted. So a trial need not be made to learn that it
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling.draw import perturbed
from ..trees.draft_tree import to_target_ids

MOST_JUDGED = 16
"""Positions that are judged at most, the latest: enough to tell right half of the time from never, and on a small
target the drafter's head over more of them costs as much as a token."""


class Hindsight(NamedTuple):
    """At how many positions a drafter was judged, and at how many the target would have kept its first token."""

    positions: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, positions: int, accepted: Tensor, logits: Tensor) -> Hindsight:
        """What a scalar says. By logits that are no numbers nothing is judged: to draft with them is noticed."""
        judged = accepted.float().masked_fill(logits.amax().isnan(), torch.nan).item()
        return cls() if isnan(judged) else cls(positions, int(judged))


@dataclass(frozen=True)
class FirstDrafts:
    """How the first token of a draft is chosen, and so how often the target would have kept it.

    Attributes:
        children: tokens that are drafted first: several in a tree.
        warping: of sampled text, what the target's processors make of draft logits `(B, n, Vd)`; `None`: it is greedy.
        noise: of sampled text, gives the noise `(B, n, V)` of each row's last `n` tokens.
    """

    children: int = 1
    warping: Callable[[Tensor], Tensor] | None = None
    noise: Callable[[int], Tensor | None] | None = None

    def accepted(self, logits: Tensor, tokens: Tensor, draft_ids: Tensor | None) -> Tensor:
        """How many of these would have been accepted, a scalar.

        Args:
            logits: the drafter's `(B, n, Vd)`.
            tokens: `(B, n)` that the target wrote there.
            draft_ids: target ids of a reduced draft vocabulary.
        """
        if self.warping is not None:
            logits = self.warping(logits)
            noise = None if self.noise is None else self.noise(logits.shape[1])
            assert noise is not None, "the text is sampled"
            noise = noise.to(logits.device)
            logits = perturbed(logits, noise[..., : logits.shape[-1]] if draft_ids is None else noise[..., draft_ids])
        likeliest = logits.topk(self.children, dim=-1).indices  # (B, n, k)
        return (to_target_ids(likeliest, draft_ids) == tokens[..., None]).any(-1).sum()
