"""Muon on the drafter's matrices, AdamW on its head, norms and biases, as one optimiser for `Trainer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..targets.devices import quick_dtype

ADAM_BETAS = (0.9, 0.95)  # EAGLE-3's
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients
ITERATIONS = 5


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose first group is stepped by Muon (orthogonalised momentum, Jordan 2024).

    Muon reaches the loss of AdamW in about half the steps on matrices that map hidden states to hidden states. Heads,
    embeddings and vectors are AdamW's by its author's advice. Written here and not taken from torch, whose Muon
    multiplies in bfloat16 also where a processor has to emulate that: two cores of a Zen 3 took 4.3 to 4.6 s for a step
    of the embedded pair's drafter, of which 0.09 to 0.15 s are left.

    Args:
        lr: of AdamW, a tenth of Muon's.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, lr: float):
        groups = [{"params": list(matrices), "lr": 10 * lr}, {"params": list(others), "lr": lr}]
        super().__init__(groups, lr=lr, betas=ADAM_BETAS, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both; gradients of Muon's matrices are used up."""
        matrices = self.param_groups[0]
        for parameter in matrices["params"]:
            if parameter.grad is not None:
                self._muon_step(parameter, matrices["lr"])
                parameter.grad = None  # AdamW passes it over
        super().step()

    def _muon_step(self, parameter: nn.Parameter, lr: float) -> None:
        gradient: Any = parameter.grad
        state = self.state[parameter]
        if not state:  # AdamW reads a step of every parameter when states are loaded
            state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(gradient)}
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(state["momentum"], MOMENTUM)
        update = orthogonalized(ahead, quick_dtype(torch.bfloat16, parameter.device))
        rows, columns = parameter.shape
        parameter.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix with singular values near 1, by Newton-Schulz iterations in `dtype`."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def make_optimizer(drafter: nn.Module, lr: float) -> MuonWithAdamW:
    """The optimiser of the drafter's trainable parameters.

    Args:
        lr: of AdamW, a tenth of Muon's.
    """
    named = [(key, parameter) for key, parameter in drafter.named_parameters() if parameter.requires_grad]
    matrices = {
        key: parameter
        for key, parameter in named
        if parameter.ndim == 2 and "lm_head" not in key and "embed_tokens" not in key
    }
    return MuonWithAdamW(matrices.values(), [parameter for key, parameter in named if key not in matrices], lr=lr)
