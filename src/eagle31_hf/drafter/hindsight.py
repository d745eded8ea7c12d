"""Whether a drafter that rests would have been right: its first draft token at positions whose text is known by now.

A rest ends with the drafter reading what it missed. That pass says what it would have drafted first behind each of
those positions, and the target has written since what had to be drafted. So a trial need not be made to learn that it
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling.logits_processing import DraftWarping
from ..trees.draft_tree import to_target_ids

MOST_JUDGED = 16
"""Positions that are judged at most, the latest: enough to tell right half of the time from never, and on a small
target the drafter's head over more of them costs as much as a token."""


class Hindsight(NamedTuple):
    """At how many positions a drafter was judged, and at how many the target would have kept its first token."""

    positions: int = 0
    accepted: float = 0.0

    @classmethod
    def of(cls, positions: int, accepted: Tensor, logits: Tensor) -> Hindsight:
        """What a scalar says. By logits that are no numbers nothing is judged: to draft with them is noticed."""
        judged = accepted.float().masked_fill(logits.amax().isnan(), torch.nan).item()
        return cls() if isnan(judged) else cls(positions, judged)


@dataclass(frozen=True)
class FirstDrafts:
    """How the first token of a draft is chosen, and so how often the target would keep it.

    Attributes:
        children: likeliest tokens that are drafted first, several in a tree; of drawn drafts one.
        drawn: the token is drawn from the drafter's distribution, and accepted by rejection.
        warping: of drawn ones, the target's processors; `None`: there are none.
    """

    children: int = 1
    drawn: bool = False
    warping: DraftWarping | None = None

    def accepted(self, logits: Tensor, tokens: Tensor, chances: Tensor | None, draft_ids: Tensor | None) -> Tensor:
        """How many of these would have been accepted: a count, or of drawn ones what is expected of it. A scalar.

        A drawn draft is kept with probability `sum(min(p, q))`, the mean of `min(1, q(x) / p(x))` over what the target
        draws. The text is such a draw, so of its distribution only `p(x)` need be remembered.

        Args:
            logits: the drafter's `(B, T, Vd)`.
            tokens: `(B, T)` that the target wrote there.
            chances: `(B, T)` the target's probability of each, 1 where `None`; only asked of drawn ones.
            draft_ids: target ids of a reduced draft vocabulary.
        """
        if not self.drawn:
            likeliest = logits.topk(self.children, dim=-1).indices  # (B, T, k)
            return (to_target_ids(likeliest, draft_ids) == tokens[..., None]).any(-1).sum()
        flat = logits.flatten(0, 1)
        scores = flat.float() if self.warping is None else self.warping(flat)
        probs = scores.softmax(-1).view(logits.shape)
        ids = torch.arange(logits.shape[-1], device=logits.device) if draft_ids is None else draft_ids
        drafted = probs.masked_fill(ids != tokens[..., None], 0.0).sum(-1)  # (B, T), 0 where it cannot be drafted
        return drafted.sum() if chances is None else (drafted / chances).clamp(max=1.0).nan_to_num(0.0).sum()
