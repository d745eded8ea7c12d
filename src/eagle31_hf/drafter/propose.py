"""What is drafted in a round, token by token: how each is chosen, and chains. Trees: `dynamic`.

The tokens that score best are drafted. For text that is sampled, scores are perturbed by the noise the target's token
will be chosen by (`sampling.draw`), so the best one is what the drafter would have drawn, and its softmax still says
how likely it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafting.draft_tree import to_target_ids
from ..drafting.shape import DraftShape
from ..sampling.draw import argmax, perturbed
from ..sampling.logits_processing import DraftWarping
from .session import DraftState

# Draft logits (B, Vd) and the target ids drafted so far, each (B,), to processed scores (B, Vd) or (B, V).
DraftScores = Callable[[Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class DraftChoice:
    """How draft tokens are chosen: by the drafter's logits as they are, processed, or perturbed as well.

    Attributes:
        scores: the target's processors on draft logits; `None` leaves them as they are.
        noise: `(B, K, V)` exponential noise of the next `K` positions; `None`: the text is greedy.
        seen: `(B, V)` which tokens the text has through the root, where `scores` ask. That a draft adds some is left
            out: it changes what is drafted and never what is written.
    """

    scores: DraftScores | DraftWarping | None = None
    noise: Tensor | None = None
    seen: Tensor | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the logits decide as they are."""
        return self.scores is None and self.noise is None

    def rank(
        self, logits: Tensor, drafted: Sequence[Tensor], draft_ids: Tensor | None, *, depth: int, at_least: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Scores `(B, S)` of at least so many candidates, and their target ids: `(S,)`, `(B, S)`, or `None` for all.

        Args:
            logits: of the drafter, `(B, Vd)`.
            drafted: target ids drafted before in this chain, each `(B,)`.
            draft_ids: target ids of a reduced draft vocabulary.
            depth: of the token that is chosen: the first one has 0.
        """
        ranked, support = self._processed(logits, drafted, draft_ids, at_least)
        if self.noise is None:
            return ranked, support
        noise = _of_each(self.noise[:, depth].to(logits.device), ranked)  # those of a row share their depth's
        return perturbed(ranked, _of_tokens(noise, support, ranked.shape[-1])), support

    def _processed(
        self, logits: Tensor, drafted: Sequence[Tensor], draft_ids: Tensor | None, at_least: int
    ) -> tuple[Tensor, Tensor | None]:
        if self.scores is None:
            return logits, draft_ids
        if isinstance(self.scores, DraftWarping):
            seen = self.seen
            if seen is not None:
                seen = _of_tokens(_of_each(seen.to(logits.device), logits), draft_ids, logits.shape[-1])
            ranked, candidates = self.scores.candidates(logits, at_least, seen)
            return ranked, draft_ids if candidates is None else to_target_ids(candidates, draft_ids)
        ranked = self.scores(logits, drafted)
        return ranked, draft_ids if ranked.shape[-1] == logits.shape[-1] else None


BARE_CHOICE = DraftChoice()


def _of_each(of_rows: Tensor, nodes: Tensor) -> Tensor:
    """What each row `(B, V)` has, for each of its nodes: `nodes` is `(B, ...)`, or `(B * n, ...)` of a tree."""
    each = len(nodes) // len(of_rows)
    return of_rows if each == 1 else of_rows.repeat_interleave(each, dim=0)


def _of_tokens(of_vocabulary: Tensor, support: Tensor | None, width: int) -> Tensor:
    """Columns of `(B, V)` for the tokens of a support `(S,)` or `(B, S)`, or for the first `width` ones.

    A target may know a few tokens more than its drafter does.
    """
    if support is None:
        return of_vocabulary[:, :width]
    if support.dim() == 1 and torch.compiler.is_compiling():
        # Expanded constants would be folded, and what they were made of lost to its other readers (inductor, freezing).
        return of_vocabulary[:, support]
    ids = support.expand(len(of_vocabulary), -1) if support.dim() == 1 else support
    return of_vocabulary.gather(1, ids)  # indexing takes ten times as long on a CPU


def draft_chain(
    state: DraftState,
    step: Callable[..., DraftState],
    draft_to_target: Tensor | None,
    roots: Tensor,
    length: DraftShape,
    choice: DraftChoice,
) -> Tensor:
    """Draft tokens one after the other, until the chain is long enough or too doubtful: `(B, 1 + K)` with the roots.

    Args:
        state: of the root.
        step: takes what `DraftSession.step` does.
        draft_to_target: target ids of a reduced draft vocabulary.
        roots: `(B,)` the last token of each row.
        length: most tokens, and the doubt that ends a chain earlier (for all rows at once).
        choice: how each token is chosen.
    """
    tokens = [roots]
    confidence = [1.0] * roots.shape[0]  # of each row, how sure the drafter has been of every step so far
    for depth in range(length.depth):
        ranked, support = choice.rank(state.logits[:, 0], tokens[1:], draft_to_target, depth=depth)  # (B, S)
        is_last = depth + 1 == length.depth
        if length.min_confidence > 0 and not is_last:
            largest, best = ranked.softmax(-1, dtype=torch.float32).max(-1)  # (B,) each
            confidence = [before * now for before, now in zip(confidence, largest.tolist(), strict=True)]
        else:
            best = argmax(ranked)
        tokens.append(to_target_ids(best[:, None], support).squeeze(1))
        if is_last or max(confidence) < length.min_confidence:
            break
        state = step(tokens[-1][:, None], state.feedback, after=depth, depth=depth)
    return torch.stack(tokens, 1)
