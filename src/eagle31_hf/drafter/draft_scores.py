"""The target's logits processors on the drafter's scores, so that what is drafted is what may be accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..sampling.logits_processing import ScoreProcessing
from .drafter import Eagle31Drafter
from .propose import DraftScores


def draft_scores(
    drafter: Eagle31Drafter,
    processing: ScoreProcessing,
    prefix: Callable[[int, Tensor], Tensor],
    rows: Sequence[int],
    *,
    do_sample: bool,
) -> DraftScores | None:
    """Draft logits to processed scores, step by step; `None` where logits decide as they are.

    Args:
        drafter: attached.
        processing: the target's processors.
        prefix: token ids `(1, t)` of the `b`-th row with its drafts `(n,)` behind them.
        rows: the row of the whole batch each row is.
        do_sample: tokens are drawn; for an arg-max, scores that keep their order are as good as processed ones.
    """
    if processing.is_empty or processing.in_order:  # those are never shown drafts
        return None
    if processing.fits_draft_vocabulary:
        return processing.draft_warping if do_sample else None

    def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        taken = torch.stack(list(drafted), 1) if drafted else logits.new_empty(len(rows), 0, dtype=torch.long)
        return processing.row_scores(lambda b: prefix(b, taken[b]), over_vocabulary(drafter, logits), rows)

    return scores


def over_vocabulary(drafter: Eagle31Drafter, scores: Tensor) -> Tensor:
    """Scores `(B, Vd or V)` over the target's vocabulary; tokens that cannot be drafted get `-inf`."""
    vocabulary, ids = drafter.config.vocab_size, drafter.draft_ids
    if ids is None or scores.shape[-1] == vocabulary:
        return scores
    spread = scores.new_full((*scores.shape[:-1], vocabulary), float("-inf"))
    spread[..., ids] = scores
    return spread
