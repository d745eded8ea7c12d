"""Losses of distillation: finite, bounded, zero at the target, and as their formulas say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.training.distillation.losses import LOSSES, acceptance


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]), missing=st.floats(0.0, 0.9))
def test_losses_are_finite_bounded_and_zero_at_the_target(seed: int, scale: float, missing: float) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(4, 7) * scale).requires_grad_()
    log_probs = (torch.randn(4, 7) * scale).log_softmax(-1) + torch.log(torch.tensor(1.0 - missing))
    for name, loss in LOSSES.items():
        value = loss(logits, log_probs)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert value.isfinite().all(), name
        assert gradient.isfinite().all(), name
        assert (value >= -1e-5).all(), name
    perfect = log_probs.log_softmax(-1)
    assert torch.allclose(LOSSES["kl"](perfect, log_probs), torch.zeros(4), atol=1e-4)
    assert torch.allclose(acceptance(perfect, log_probs), torch.full((4,), 1.0 - missing), atol=1e-4)


def test_losses_are_their_formulas() -> None:
    p = torch.tensor([0.5, 0.2, 0.1])  # 0.2 of the target's mass cannot be drafted
    q = torch.tensor([0.3, 0.3, 0.4])
    renormalised = p / p.sum()
    alpha = 0.3 + 0.2 + 0.1
    kl = (renormalised * (renormalised / q).log()).sum().item()
    weight = torch.exp(torch.tensor(-3 * alpha)).item()
    expected = {
        "cross_entropy": -(renormalised * q.log()).sum().item(),
        "kl": kl,
        "total_variation": 1 - alpha,
        "lk_alpha": -torch.tensor(alpha).log().item(),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - alpha),
    }
    for name, loss in LOSSES.items():
        assert loss(q.log()[None], p.log()[None]).item() == pytest.approx(expected[name], abs=1e-6), name


def test_a_token_the_target_rules_out_is_no_nan() -> None:
    log_probs = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    for name, loss in LOSSES.items():
        logits = torch.zeros(1, 3, requires_grad=True)
        loss(logits, log_probs).sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all(), name
