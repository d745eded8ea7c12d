"""The target's logits processors on the drafter's scores, so that what is drafted is what may be accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..sampling.logits_processing import ScoreProcessing
from .drafter import Eagle31Drafter
from .propose import DraftScores

logger = logging.getLogger(__name__)

UNKNOWN = -1e4
"""Score of a token that cannot be drafted: below all others, and still above what a grammar forbids."""


def draft_scores(
    drafter: Eagle31Drafter,
    processing: ScoreProcessing,
    prefix: Callable[[int, Tensor], Tensor],
    rows: Sequence[int],
    *,
    do_sample: bool,
    eos_ids: frozenset[int] = frozenset(),
) -> DraftScores | None:
    """Draft logits to processed scores, step by step; `None` where logits decide as they are.

    Args:
        drafter: attached.
        processing: the target's processors.
        prefix: token ids `(1, t)` of the `b`-th row with its drafts `(n,)` behind them.
        rows: the row of the whole batch each row is.
        do_sample: tokens are drawn; for an arg-max, scores that keep their order are as good as processed ones.
        eos_ids: tokens that end a text: a grammar is not asked what comes behind.
    """
    if processing.can_fork:
        return _ScoresInGrammar(drafter, processing, prefix, rows, eos_ids)
    if processing.is_empty or processing.in_order:  # those are never shown drafts
        return None
    if processing.fits_draft_vocabulary:
        return processing.draft_warping if do_sample else None

    def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        taken = torch.stack(list(drafted), 1) if drafted else logits.new_empty(len(rows), 0, dtype=torch.long)
        return processing.row_scores(lambda b: prefix(b, taken[b]), over_vocabulary(drafter, logits), rows)

    return scores


class _ScoresInGrammar:
    """One draft's scores by copies of processors that keep state, which see root and drafts as plain decoding would.

    A token the drafter does not know is drafted where the grammar allows nothing better, above all where it alone may
    come. Drafts that go astray cost time and never a token, so copies are not asked again once they have nothing to
    say: the text has ended, nothing is allowed, or they raise, which only the originals may do to a caller.
    """

    def __init__(
        self,
        drafter: Eagle31Drafter,
        processing: ScoreProcessing,
        prefix: Callable[[int, Tensor], Tensor],
        rows: Sequence[int],
        eos_ids: frozenset[int],
    ):
        self._drafter, self._prefix, self._rows, self._eos_ids = drafter, prefix, rows, eos_ids
        self._fork = _forked(processing)

    def __call__(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Scores `(B, V)` of draft logits `(B, Vd)`; the logits over `V` where no copy is asked any more."""
        full = over_vocabulary(self._drafter, logits.float(), unknown=UNKNOWN)
        if self._fork is None or (drafted and not self._eos_ids.isdisjoint(drafted[-1].tolist())):
            return full
        taken = torch.stack(list(drafted), 1) if drafted else logits.new_empty(len(self._rows), 0, dtype=torch.long)
        try:
            scores = self._fork.row_scores(lambda b: self._prefix(b, taken[b]), full, self._rows)
        except Exception as error:
            logger.debug("eagle31: drafting goes on outside the grammar: %r", error)
            self._fork = None
            return full
        if not bool(scores.isfinite().any(-1).all()):
            self._fork = None
            return full
        return scores


def _forked(processing: ScoreProcessing) -> ScoreProcessing | None:
    try:
        return processing.fork()
    except Exception as error:  # a caller's `fork_for_drafts`; plain decoding would not have asked for it
        logger.debug("eagle31: drafting goes on outside the grammar: %r", error)
        return None


def over_vocabulary(drafter: Eagle31Drafter, scores: Tensor, unknown: float = float("-inf")) -> Tensor:
    """Scores `(B, Vd or V)` over the target's vocabulary; tokens that cannot be drafted get `unknown`."""
    vocabulary, ids = drafter.config.vocab_size, drafter.draft_ids
    if ids is None or scores.shape[-1] == vocabulary:
        return scores
    spread = scores.new_full((*scores.shape[:-1], vocabulary), unknown)
    spread[..., ids] = scores
    return spread
