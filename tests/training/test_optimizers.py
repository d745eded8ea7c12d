"""Muon steps as torch's does where bfloat16 is quick, and in float32 where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle31_hf.training import trainer
from eagle31_hf.training.trainer import MuonWithAdamW


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.bfloat16, 1e-6), (torch.float32, 0.05)])
def test_steps_are_those_of_torchs_muon(
    shape: tuple[int, int], precision: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trainer, "quick_dtype", lambda *_: precision)
    ours, theirs, vector = (nn.Parameter(torch.zeros(each)) for each in (shape, shape, 8))
    mine = MuonWithAdamW(nn.ParameterDict({"matrix": ours, "vector": vector}), lr=0.1)
    muon = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad, vector.grad = gradient.clone(), gradient.clone(), torch.ones(8)
        mine.step()
        muon.step()
    assert torch.allclose(ours, theirs, atol=3 * tolerance)
    assert precision == torch.bfloat16 or not torch.equal(ours, theirs)
    assert torch.allclose(vector, torch.full((8,), -0.3), atol=1e-5), "AdamW's steps"
