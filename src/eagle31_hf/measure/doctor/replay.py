"""What a drafter would draft at every position of a text that is known already, and where it looks (`drafter.replay`).

The attention weights are computed in the open, so they can be looked at. `S` starts, `K` draft depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...drafter.drafter import Eagle31Drafter
from ...drafter.replay import StartsCache, TargetText, drafts_along, rows_of_ids

SINK_TOKENS = 4
"""First tokens of a prompt counted as its sink (StreamingLLM, arXiv 2309.17453, keeps four)."""


@dataclass(frozen=True)
class Replay:
    """Drafts from every start of one text.

    Attributes:
        drafted: `(S, K)` draft-vocabulary rows the drafter thought likeliest.
        right: `(S, K)` bool; the draft is what the target wrote, and so are all drafts before it.
        log_probs: `(S, K)` log-probability the drafter gave to what the target wrote; NaN where that cannot be drafted.
        attention: `(S, K, 3)` share of the attention on the prompt's sink, on the rest of the text, and on the
            drafter's own tokens of this draft; mean over heads and layers.
        feedback_norm: `(S, K)` length of the hidden state that is fed back after each depth.
    """

    drafted: Tensor
    right: Tensor
    log_probs: Tensor
    attention: Tensor
    feedback_norm: Tensor

    @property
    def accepted(self) -> Tensor:
        """`(S,)` drafts accepted from each start."""
        return self.right.sum(1)


@torch.no_grad()
def replay(drafter: Eagle31Drafter, text: TargetText, *, depth: int) -> Replay:
    """Draft `depth` tokens from every start of `text` with an attached `drafter`."""
    starts = text.starts(depth).to(drafter.fc.weight.device)
    cache = _ObservedCache(starts)
    row_of = rows_of_ids(drafter)
    drafted, right, log_probs, norms = [], [], [], []
    still_right = torch.ones_like(starts, dtype=torch.bool)
    for draft in drafts_along(drafter, text, starts, depth, cache):
        wanted = draft.truth if row_of is None else row_of[draft.truth]
        scores = draft.logits.float().log_softmax(-1)  # (S, Vd)
        drafted.append(scores.argmax(-1))
        still_right = still_right & (drafted[-1] == wanted)
        right.append(still_right)
        given = scores.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
        log_probs.append(torch.where(wanted >= 0, given, torch.nan))
        norms.append(draft.feedback.float().norm(dim=-1))
    return Replay(*(torch.stack(parts, 1).cpu() for parts in (drafted, right, log_probs, cache.shares(), norms)))


class _ObservedCache(StartsCache):
    """Notes where the queries of drafts look."""

    def __init__(self, starts: Tensor):
        super().__init__(starts)
        self._shares: list[dict[int, Tensor]] = []  # per depth and layer (S, 3)

    def shares(self) -> list[Tensor]:
        """`(S, 3)` per depth: sink, rest of the text, own tokens."""
        return [torch.stack(list(by_layer.values())).mean(0) for by_layer in self._shares]

    def see_text(self, layer_idx: int, query: Tensor) -> None:
        of_starts = query[:, :, self._starts].transpose(0, 2)  # (S, n, 1, d)
        self.see_drafts(layer_idx, self.weights(layer_idx, of_starts))

    def see_drafts(self, layer_idx: int, weights: Tensor) -> None:
        depth = 0 if layer_idx not in self._own else self._own[layer_idx][0].shape[2]
        if depth == len(self._shares):
            self._shares.append({})
        mean = weights.float().mean((1, 2))  # (S, T + k)
        length = self._of_text[layer_idx][0].shape[2]
        parts = (mean[:, :SINK_TOKENS], mean[:, SINK_TOKENS:length], mean[:, length:])
        self._shares[depth][layer_idx] = torch.stack([part.sum(1) for part in parts], dim=1)
