"""What a training run will take, told before it starts: disk and memory by arithmetic, time by one step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..targets.devices import now
from .data import collate
from .measure import KnownTexts, rounds_of
from .objectives import DistillationModel


@dataclass(frozen=True)
class StagePlan:
    """A stage's optimiser steps, the seconds of one, measured, and how often acceptance is measured among them."""

    name: str
    steps: int
    step_s: float
    measurements: int


@dataclass(frozen=True)
class TrainingPlan:
    """Figures of a run."""

    rows: int  # rows, tokens, supervised_tokens: packed rows and what they hold
    tokens: int
    supervised_tokens: int
    coverage: float  # share of the supervised tokens that can be drafted
    rows_per_step: int  # packed rows in an optimiser step, on all processes together
    stages: tuple[StagePlan, ...]  # in order
    measurement_s: float  # seconds of a measurement of acceptance, from one text of it
    prompts: int  # that acceptance is measured on
    disk_bytes: int  # checkpoints at their most
    training_bytes: int  # memory beside the target: weights, gradients, optimiser, activations of one batch

    @property
    def total_s(self) -> float:
        """Expected seconds of training and measuring."""
        return sum(stage.steps * stage.step_s + stage.measurements * self.measurement_s for stage in self.stages)

    @property
    def tokens_per_step(self) -> float:
        """Tokens in an optimiser step, without padding."""
        return self.tokens / max(1, self.rows) * self.rows_per_step

    def __str__(self) -> str:
        steps = ", then ".join(f"{stage.steps:,} at {stage.step_s:.2f} s" for stage in self.stages)
        measurements = sum(stage.measurements for stage in self.stages)
        return "\n".join(
            (
                f"data      {self.tokens:,} tokens in {self.rows:,} rows",
                f"learned   {self.supervised_tokens:,} tokens, {self.coverage:.2%} of them can be drafted",
                f"steps     {steps}",
                f"measured  {measurements} x {self.prompts} prompts, about {self.measurement_s:.0f} s each",
                f"time      {self.total_s / 60:.1f} minutes",
                f"memory    {self.training_bytes / 1e9:.2f} GB beside the target",
                f"disk      {self.disk_bytes / 1e9:.2f} GB",
            )
        )


def training_bytes(model: DistillationModel, batch_tokens: int) -> int:
    """Memory beside the target: float32 weights, gradients and two optimiser moments, and activations of one batch."""
    config, steps = model.drafter.config, model.steps
    parameters = sum(p.numel() for p in model.drafter.parameters() if p.requires_grad)
    per_token = 4 * (  # float32 at its most
        2 * config.draft_vocab_size * (1 if model.gradient_checkpointing else steps)  # type: ignore[operator]
        + config.draft_vocab_size  # type: ignore[operator]
        + steps * (12 * config.hidden_size + 3 * config.intermediate_size)
        + config.num_aux_hidden_states * config.target_hidden_size  # type: ignore[operator]
    )
    return 16 * parameters + per_token * batch_tokens


def checkpoint_bytes(drafter: Eagle31Drafter, kept: int) -> int:
    """Disk for `kept` checkpoints: float32 weights and two moments each."""
    return 12 * kept * sum(p.numel() for p in drafter.parameters())


def time_step(model: DistillationModel, rows: Sequence[dict[str, Tensor]], *, bf16: bool) -> float:
    """Seconds of forward and backward over one batch of these rows; the model is left as it was.

    It is done twice: the first time pays for memory and kernels.
    """
    device = model.drafter.device
    batch = {name: tensor.to(device) for name, tensor in collate(rows).items()}
    seconds = 0.0
    with torch.random.fork_rng():
        for _ in range(2):
            started = now(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                model(**batch).loss.backward()
            seconds = now(device) - started
            model.zero_grad(set_to_none=True)
    return seconds


def time_measurement(drafter: Eagle31Drafter, known: Sequence[KnownTexts], depth: int) -> float:
    """Seconds that acceptance on known texts will take: of the first text of each temperature, times the others."""
    seconds = 0.0
    for texts in known:
        started = now(drafter.device)
        rounds_of(drafter, replace(texts, texts=texts.texts[:1]), depth)
        seconds += (now(drafter.device) - started) * len(texts.texts)
    return seconds
