"""Muon on the drafter's matrices, AdamW on its head, norms and biases, behind one optimiser for `Trainer`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import ConfigurationError
from ...target.precision import quick_dtype

logger = logging.getLogger(__name__)

OPTIMIZERS = ("auto", "muon", "adamw")
ADAM_BETAS = (0.9, 0.95)  # EAGLE-3's


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimisers as one: schedules, clipping and checkpoints see a single list of parameter groups.

    Muon (orthogonalised momentum, Jordan 2024; `torch.optim.Muon`) reaches the loss of AdamW in about half the steps on
    matrices that map hidden states to hidden states. Heads, embeddings and vectors are AdamW's by its author's advice.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, lr: float, muon_lr: float):
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(list(matrices), lr=muon_lr, weight_decay=0.0),
            "adamw": torch.optim.AdamW(list(others), lr=lr, betas=ADAM_BETAS, weight_decay=0.0),
        }
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very same dicts, so that a schedule that changes ours changes theirs.
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        with self._precision():
            self._parts["muon"].step()
        self._parts["adamw"].step()

    def _precision(self) -> AbstractContextManager:
        """What Muon orthogonalises in: bfloat16, as its author does, unless the device has to emulate that."""
        device = self.param_groups[0]["params"][0].device
        return nullcontext() if quick_dtype(torch.bfloat16, device) is torch.bfloat16 else Float32InPlaceOfBfloat16()

    def state_dict(self) -> dict[str, Any]:
        """`{"muon": ..., "adamw": ...}`."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()


class Float32InPlaceOfBfloat16(TorchFunctionMode):
    """Tensors that would become bfloat16 become float32.

    `torch.optim.Muon` multiplies in bfloat16 wherever it runs. A CPU without arithmetic for that (two cores of a Zen 3)
    took 4.3 to 4.6 s for a step of the embedded pair's drafter, of which 0.09 to 0.15 s are left.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # it is written to
        return func(*args, **(kwargs or {}))


def make_optimizer(drafter: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """The optimiser called `name` over the drafter's trainable parameters.

    Args:
        name: `"muon"`, `"adamw"`, or `"auto"`: Muon where this torch has it (2.9 and later).
        lr: of AdamW, a tenth of Muon's.

    Raises:
        ConfigurationError: this torch has no Muon.
    """
    has_muon = hasattr(torch.optim, "Muon")
    if name == "muon" and not has_muon:
        raise ConfigurationError(f"torch {torch.__version__} has no Muon; update to 2.9 or use optimizer='adamw'")
    if name == "auto" and not has_muon:
        logger.warning("eagle31: torch %s has no Muon, training with AdamW", torch.__version__)
    named = [(key, parameter) for key, parameter in drafter.named_parameters() if parameter.requires_grad]
    if name == "adamw" or not has_muon:
        return torch.optim.AdamW([p for _, p in named], lr=lr, betas=ADAM_BETAS, weight_decay=0.0)
    matrices = [p for key, p in named if p.ndim == 2 and "lm_head" not in key and "embed_tokens" not in key]
    taken = {id(p) for p in matrices}
    return MuonWithAdamW(matrices, [p for _, p in named if id(p) not in taken], lr=lr, muon_lr=10 * lr)
