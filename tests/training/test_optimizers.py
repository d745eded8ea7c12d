"""Muon multiplies in bfloat16 where that is quick, else in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.training import trainer
from eagle31_hf.training.trainer import MuonWithAdamW

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan's


def orthogonalized(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations, `(R, C)` with R <= C."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def step(precision: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """The gradient, and how a matrix has changed by it where `precision` is quick."""
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.zeros(8))
    gradient, vector.grad = torch.randn(24, 40), torch.randn(8)
    matrix.grad = gradient.clone()
    monkeypatch.setattr(trainer, "quick_dtype", lambda *_: precision)
    MuonWithAdamW([matrix], [vector], lr=0.1).step()
    assert torch.allclose(vector, -0.1 * vector.grad.sign(), atol=1e-6), "AdamW's first step"
    return gradient, matrix.detach()


def test_in_float32_where_bfloat16_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, change = step(torch.float32, monkeypatch)
    assert torch.allclose(change, -orthogonalized(gradient), atol=1e-5)


def test_in_bfloat16_where_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, change = step(torch.bfloat16, monkeypatch)
    assert torch.equal(change, change.bfloat16().float())
    assert torch.allclose(change, -orthogonalized(gradient), atol=0.05)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_steps_are_those_of_torchs_muon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trainer, "quick_dtype", lambda *_: torch.bfloat16)
    ours, theirs = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
    mine = MuonWithAdamW([ours], [nn.Parameter(torch.zeros(1))], lr=0.1)
    muon = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        muon.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
