"""The target's logits processors on the drafter's scores, so that what is drafted is what may be accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import first_line, is_callers
from ..sampling.logits_processing import ScoreProcessing
from .drafter import Eagle31Drafter
from .propose import DraftScores

UNKNOWN = -1e4
"""Score of a token that cannot be drafted: below all others, and still above what a grammar forbids."""


class RowScores:
    """One row's draft scores by the target's processors, shown root and drafts as plain decoding would: those that keep
    state, a grammar's above all, are copied.

    Drafts that go astray cost time and never a token, so processors are not asked again once they have nothing to say:
    the text has ended or nothing is allowed. Where copying or a copy raises, which only the originals may do to a
    caller, the rest of the text is drafted without.

    Args:
        processing: `can_fork`.
        prefix: token ids `(1, t)` of the row with its drafts `(n,)` behind them.
        row: which of the whole batch it is.
        eos_ids: tokens that end a text: a grammar is not asked what comes behind.
        report: takes the reason why drafts of a text are made outside the grammar.
    """

    def __init__(
        self,
        processing: ScoreProcessing,
        prefix: Callable[[Tensor], Tensor],
        row: int,
        *,
        eos_ids: frozenset[int],
        report: Callable[[str], None],
    ):
        self._processing, self._prefix, self._row = processing, prefix, row
        self._eos_ids, self._report = eos_ids, report
        self._forked: ScoreProcessing | None = None
        self._is_silent = False

    def __call__(self, scores: Tensor, drafted: Tensor) -> Tensor:
        """Processed draft scores `(1, V)` after drafts `(n,)`, or the scores as they are where nothing is asked."""
        is_grammar = bool(self._processing.in_order)  # others need not wait for the device to say that it has ended
        has_ended = is_grammar and len(drafted) > 0 and int(drafted[-1]) in self._eos_ids
        processed = None if has_ended or self._is_silent else self._ask(scores, drafted)
        self._is_silent = processed is None or (is_grammar and not bool(processed.isfinite().any()))
        return scores if processed is None or self._is_silent else processed

    def _ask(self, scores: Tensor, drafted: Tensor) -> Tensor | None:
        try:
            if self._forked is None:
                self._forked = self._processing.fork()
            return self._forked.row_scores(lambda _b: self._prefix(drafted), scores, [self._row])
        except Exception as error:
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not is_callers(error):
                raise  # the decoder gives something up and tries again
            self._processing.forks_no_more = True
            names, said = ", ".join(self._processing.in_order), first_line(error)
            self._report(
                f"the rest is drafted outside the grammar: a copy of {names} raised {type(error).__name__}: {said}"
            )
            return None


def draft_scores(drafter: Eagle31Drafter, scorers: Mapping[int, RowScores]) -> DraftScores:
    """Draft logits to scores `(B, V)` of a batch of which the rows of `scorers` are processed; others' logits decide as
    they are.

    A token the drafter does not know is drafted where the grammar allows nothing better, above all where it alone may
    come.
    """

    def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        spread = over_vocabulary(drafter, logits.float())
        taken = torch.stack(list(drafted), 1) if drafted else logits.new_empty(len(logits), 0, dtype=torch.long)
        rows = [scorers[b](row[None], taken[b]) if b in scorers else row[None] for b, row in enumerate(spread)]
        return torch.cat(rows)

    return scores


def over_vocabulary(drafter: Eagle31Drafter, scores: Tensor) -> Tensor:
    """Scores `(B, Vd or V)` over the target's vocabulary; tokens that cannot be drafted get `UNKNOWN`."""
    vocabulary, ids = drafter.vocabulary, drafter.draft_ids
    if ids is None or scores.shape[-1] == vocabulary:
        return scores
    spread = scores.new_full((*scores.shape[:-1], vocabulary), UNKNOWN)
    spread[..., ids] = scores
    return spread
