"""How many rounds a known text takes with chains of drafts, in expectation over the drafts. Pure.

A text the target has written is fixed; what is left to chance is which drafts were drawn, and that is had in closed
form. With `r_j = q(x_j) / p(x_j)` at the tokens `x_1, x_2, ...` that follow a round's root, the round keeps `k` drafts
or more with chance

    g_k = min(1, r_1, r_1 r_2, ..., r_1 ... r_k)

since block verification (`rejection.accept_block`) keeps a drafted chain with chance `P_k`, the chain is drafted with
chance `q(x_1) ... q(x_k)` and the text begins so with chance `p(x_1) ... p(x_k)`, and `P_k` times their ratio is `g_k`.
That the text goes on in one way or another tells nothing more: a round that keeps less has drawn its last token by what
follows from the tokens before it. Judged token by token the chance would be the product of the `min(1, r_j)`.

`T` positions that may be a round's root, `K` drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chance_kept(draft_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """`g` `(T, K)`: chance that a round keeps drafts up to the k-th, given the text.

    Args:
        draft_log_probs: `(T, K)` log q of the text's tokens after each root; -inf where they cannot be drafted.
        target_log_probs: `(T, K)` log p of the same. The text was drawn from it, so where it says -inf (a token at the
            very edge of top-k, in another order of summation) both are taken as equal.
    """
    log_ratio = torch.where(target_log_probs.isneginf(), 0.0, draft_log_probs - target_log_probs)
    log_ratio = log_ratio.masked_fill(draft_log_probs.isneginf(), float("-inf")).double()
    return log_ratio.cumsum(1).cummin(1).values.clamp(max=0).exp()


def expected_visits(kept: Tensor) -> Tensor:
    """`(T,)` chance that a round begins at each position; their sum is the expected number of rounds.

    Args:
        kept: `(T, K)` as `chance_kept` gives it. The first round begins at position 0, a round that keeps `k` drafts
            leads `k + 1` positions on, and whatever leads beyond the last position ends the text.
    """
    positions, depth = kept.shape
    exactly = torch.cat((torch.ones_like(kept[:, :1]), kept), 1)
    exactly[:, :-1] -= kept  # (T, K+1) chance of so many and no more
    visits = kept.new_zeros(positions + depth + 1)
    visits[:1] = 1.0
    for position in range(positions):
        visits[position + 1 : position + depth + 2] += visits[position] * exactly[position]
    return visits[:positions]
