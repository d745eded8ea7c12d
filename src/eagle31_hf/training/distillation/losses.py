"""Token losses of distillation: how far the drafter's distribution is from the target's, one number per position.

`p` is the target's probability over its *whole* vocabulary, looked up at the draft ids (so `sum p <= 1`); `p'` is `p`
renormalised over the draft vocabulary; `q` is the drafter's distribution; `alpha = sum min(p, q)` is the chance that
rejection sampling accepts one draft drawn from `q` (arXiv 2211.17192).

Every loss takes `draft_logits (N, Vd)` and `target_log_probs (N, Vd) = log p` and returns `(N,)` float32, in nats
(`total_variation`: a probability). All are finite and have finite gradients for finite input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LossFunction = Callable[[Tensor, Tensor], Tensor]

HYBRID_RATE = 3.0
"""`eta` of LK-hybrid; the best of those tried in arXiv 2602.23881."""


def cross_entropy(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`-sum p' log q`: the token loss of EAGLE-3 (arXiv 2503.01840; SafeAILab/EAGLE, SpecForge, TorchSpec)."""
    target_probs = target_log_probs.float().softmax(-1)
    return -(target_probs * draft_logits.float().log_softmax(-1)).sum(-1)


def kl_divergence(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`sum p' log(p' / q)`: gradients of `cross_entropy`, but 0 at the optimum (speculators' default)."""
    renormalised = target_log_probs.float().log_softmax(-1)
    difference = renormalised - draft_logits.float().log_softmax(-1)
    # A token the target rules out has p' = 0 and log p' = -inf; its share of the sum is 0, not NaN.
    return torch.where(renormalised.isneginf(), 0.0, renormalised.exp() * difference).sum(-1)


def acceptance(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`alpha = sum min(p, q)`: chance that a draft from `q` is accepted, `(N,)`."""
    return torch.minimum(target_log_probs.float().exp(), draft_logits.float().softmax(-1)).sum(-1)


def total_variation(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`1 - alpha`, the total variation distance (arXiv 2310.08461). Its gradient vanishes far from the target, so it
    does not train a drafter from scratch (arXiv 2602.23881).
    """
    return 1.0 - acceptance(draft_logits, target_log_probs)


def lk_alpha(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`-log alpha` (arXiv 2602.23881): total variation's gradient over `alpha`; cross-entropy at one-hot `p`."""
    # Where p and q do not overlap at all alpha is 0 and so is its gradient; the floor keeps the quotient finite.
    return -acceptance(draft_logits, target_log_probs).clamp(min=torch.finfo(torch.float32).tiny).log()


def lk_hybrid(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`lam * KL + (1 - lam) * (1 - alpha)`, `lam = exp(-eta * alpha)` held constant (LK-lambda, arXiv 2602.23881).

    KL while the drafter is far off, total variation once it is close. `lam` is taken per position as in speculators;
    SpecForge averages `alpha` over the batch, which would make the loss depend on how a batch is split over devices.
    """
    alpha = acceptance(draft_logits, target_log_probs)
    weight = torch.exp(-HYBRID_RATE * alpha.detach())
    return weight * kl_divergence(draft_logits, target_log_probs) + (1.0 - weight) * (1.0 - alpha)


LOSSES: dict[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "kl": kl_divergence,
    "lk_alpha": lk_alpha,
    "lk_hybrid": lk_hybrid,
    "total_variation": total_variation,
}
