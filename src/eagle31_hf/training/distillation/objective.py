"""What stage 1 minimises, as plain values: settings can be read without importing the trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistillationSettings:
    """What stage 1 minimises.

    Attributes:
        steps: draft steps `S` of the training-time test.
        step_decay: weight of step `s` is `step_decay ** s`.
        loss: name in `losses.LOSSES`.
        given_weight: weight of tokens the target did not write itself, beside 1 for those it wrote.
    """

    steps: int = 4
    step_decay: float = 0.8
    loss: str = "cross_entropy"
    given_weight: float = 1.0
