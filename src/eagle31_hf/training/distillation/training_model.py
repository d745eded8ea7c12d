"""What is trained in stage 1: the drafter with the token loss around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...drafter.drafter import Eagle31Drafter
from ..data.packing import PackedBatch
from ..settings import DistillationSettings
from .features import compute_features
from .losses import LOSSES
from .unroll import StepLosses, make_teacher, position_weights, step_losses, weighted_sum


@dataclass
class LossOutput:
    """What one forward of a training model gives."""

    loss: Tensor  # to be differentiated: summed over positions, not yet divided
    steps: StepLosses  # its token loss in parts, for the log
    figures: dict[str, float] = field(default_factory=dict)  # further figures for the log, each a mean


class DistillationModel(nn.Module):
    """The drafter with the token loss around it: what `Trainer` and DDP see as the model.

    The target is no submodule: it is neither trained, moved nor saved.
    """

    accepts_loss_kwargs = True  # tells Trainer that accumulated batches are already weighted

    def __init__(self, drafter: Eagle31Drafter, settings: DistillationSettings):
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self.loss_function = LOSSES[settings.loss]
        self.gradient_checkpointing = False  # compute draft logits twice instead of keeping those of all steps

    def forward(self, **fields: Tensor) -> LossOutput:
        """Token loss of a packed batch, whose `fields` these are."""
        batch = PackedBatch(**fields)
        weights = self.counted(batch).flatten()
        rows = weights.nonzero().squeeze(1)
        with torch.no_grad():
            aux, logits = self.read_target(batch)
            teacher = make_teacher(logits, rows, self.drafter.draft_ids, weights[rows])
        losses = step_losses(
            self.drafter,
            batch,
            aux,
            teacher,
            loss=self.loss_function,
            steps=self.settings.steps,
            checkpoint_head=self.gradient_checkpointing,
        )
        return LossOutput(weighted_sum(losses, self.settings.step_decay), losses)

    def read_target(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The aux states `(B, T, A*Ht)` and the target's logits `(B*T, V)`, on the drafter's device."""
        binding, device = self.drafter.binding, self.drafter.device
        if batch.aux is not None:
            head: Any = binding.lm_head
            return batch.aux, head(batch.head_input).flatten(0, 1)
        features = compute_features(binding, batch.input_ids, batch.position_ids)
        return features.aux.to(device), features.logits.flatten(0, 1).to(device)

    def counted(self, batch: PackedBatch) -> Tensor:
        """`(B, T)` what each position counts for in the loss, and in what it is divided by."""
        return position_weights(batch, self.settings.given_weight)
