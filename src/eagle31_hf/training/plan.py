"""What a training run will take, told before it starts: disk and memory by arithmetic, time by a short timed probe."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..errors import TrainingError
from ..target.device_clock import now
from ..trees.shape import DraftShape
from .data.packing import PackedBatch, collate
from .distillation.evaluation import EvaluationPrompt, EvaluationSettings, measure_acceptance
from .distillation.known_texts import KnownTexts, rounds_of
from .distillation.training_model import DistillationModel
from .distillation.unroll import supervised_positions

Work = Callable[[DistillationModel, dict[str, Tensor]], object]
"""Something a model does with a batch."""

PROBE_BATCHES = 5
"""Fewer where the run itself has fewer: trying it out shall not take longer than doing it."""
PROBE_TOKENS = 8
LEARNED_ACCEPTANCE = 2.0
"""Tokens per target pass that a measurement's time is told for: an untrained drafter has 1, a good one 3 or 4."""
STEPS_FILE = "steps.json"
MOST_STEPS = 2**40
WARM_UP_S = 2.0
"""The first batches pay for memory and kernels that a run has had long since, small ones for half a dozen of them."""


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
    measurement_s: float  # seconds of a measurement of acceptance, from a few tokens of one
    prompts: int  # that acceptance is measured on
    disk_bytes: int  # checkpoints at their most
    training_bytes: int  # memory beside the target: weights, gradients, optimiser, activations of one batch
    token_loss_s: float  # seconds of an optimiser step of the token loss, measured (stage 1; stage 2 adds to it)
    bare_s: float  # of them, what target forward (if hidden states are not stored) and drafter passes alone would take

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
        overhead = self.token_loss_s / self.bare_s
        return "\n".join(
            (
                f"data      {self.tokens:,} tokens in {self.rows:,} rows",
                f"learned   {self.supervised_tokens:,} tokens, {self.coverage:.2%} of them can be drafted",
                f"steps     {steps}",
                f"measured  {measurements} x {self.prompts} prompts, about {self.measurement_s:.0f} s each",
                f"time      {self.total_s / 60:.1f} minutes",
                f"overhead  the token loss takes {overhead:.2f} x its forward and drafter passes alone",
                f"memory    {self.training_bytes / 1e9:.2f} GB beside the target",
                f"disk      {self.disk_bytes / 1e9:.2f} GB",
            )
        )


def training_bytes(model: DistillationModel, batch_tokens: int) -> int:
    """Memory beside the target: float32 weights, gradients and two optimiser moments, and activations of one batch."""
    config = model.drafter.config
    parameters = sum(p.numel() for p in model.drafter.parameters() if p.requires_grad)
    steps = model.settings.steps
    per_token = 4 * (  # float32 at its most
        2 * config.draft_vocab_size * (1 if model.gradient_checkpointing else steps)  # type: ignore[operator]
        + config.draft_vocab_size  # type: ignore[operator]
        + steps * (12 * config.hidden_size + 3 * config.intermediate_size)
        + config.num_aux_hidden_states * config.target_hidden_size  # type: ignore[operator]
    )
    return 16 * parameters + per_token * batch_tokens


def checkpoint_bytes(model: DistillationModel, kept: int) -> int:
    """Disk for `kept` checkpoints: float32 weights and two moments each."""
    return 12 * kept * sum(p.numel() for p in model.drafter.parameters())


@dataclass(frozen=True)
class Probe:
    """What is timed: `batch_rows` of these `rows` at once, in mixed precision or not; a run has so many `batches`."""

    rows: Sequence[dict[str, Tensor]]
    batch_rows: int
    bf16: bool
    batches: int


def time_step(model: DistillationModel, probe: Probe) -> float:
    """Median seconds of forward and backward over one batch; the model is left as it was."""
    return _median_times(model, (_step,), probe)[0]


def time_token_loss(model: DistillationModel, probe: Probe) -> tuple[float, float]:
    """The same, and the median of what a step cannot do without, taken in turns: a machine's speed changes."""
    step_s, bare_s = _median_times(model, (_step, _bare_parts), probe)
    return step_s, bare_s


def time_measurement(
    drafter: Eagle31Drafter, prompts: Sequence[EvaluationPrompt], settings: EvaluationSettings
) -> float:
    """Seconds that measuring acceptance on `prompts` will take: a few rounds on its first batch, times what is left.

    Prompts are read once, rounds are counted for the acceptance length of a drafter that has learned.
    """
    first = list(prompts[: settings.batch_size])
    if not first:
        return 0.0

    def seconds_of(new_tokens: int) -> float:
        started = now(drafter.device)
        measure_acceptance(drafter, first, replace(settings, max_new_tokens=new_tokens))
        return now(drafter.device) - started

    seconds_of(1)  # pays for kernels and memory
    few, more = seconds_of(1), seconds_of(1 + PROBE_TOKENS)
    rounds = settings.max_new_tokens / LEARNED_ACCEPTANCE
    return (few + max(0.0, more - few) / PROBE_TOKENS * rounds) * len(prompts) / len(first)


def time_known_texts(drafter: Eagle31Drafter, known: Sequence[KnownTexts], shape: DraftShape) -> float:
    """Seconds that acceptance on known texts will take: of the first text of each temperature, times the others."""
    seconds = 0.0
    for texts in known:
        started = now(drafter.device)
        rounds_of(drafter, replace(texts, texts=texts.texts[:1]), shape)
        seconds += (now(drafter.device) - started) * len(texts.texts)
    return seconds


def _step(model: DistillationModel, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def _bare_parts(model: DistillationModel, batch: dict[str, Tensor]) -> None:
    """A target forward, unless its hidden states are stored, and `S` drafter passes, each with its backward.

    A bare pass is causal over the batch and ends in the loss at the supervised positions against a fixed answer.
    """
    drafter, ids = model.drafter, batch["input_ids"]
    with torch.no_grad():
        if "aux" not in batch:
            drafter.binding.model(input_ids=ids, use_cache=False)
        embeddings = drafter.embed(ids)
    supervised = supervised_positions(PackedBatch(**batch))
    answers = torch.zeros(int(supervised.sum()), dtype=torch.long, device=ids.device)
    width = drafter.config.num_aux_hidden_states * drafter.config.target_hidden_size  # type: ignore[operator]
    aux = torch.randn(*ids.shape, width, device=ids.device)
    for step in range(model.settings.steps):
        hidden = drafter.fuse_aux(aux) if step == 0 else torch.randn_like(embeddings)
        out = drafter.decode(embeddings, hidden, drafter.rotary(batch["position_ids"]))
        logits = drafter.draft_logits(out.normed[supervised])
        torch.nn.functional.cross_entropy(logits.float(), answers).backward()


def _median_times(model: DistillationModel, works: Sequence[Work], probe: Probe) -> list[float]:
    """Median seconds of each of `works`, all of them on one batch after the other."""
    device, rows = model.drafter.device, probe.rows

    def seconds_of(work: Work, turn: int) -> float:
        chosen = [rows[(turn * probe.batch_rows + i) % len(rows)] for i in range(probe.batch_rows)]
        batch = {name: tensor.to(device) for name, tensor in collate(chosen).items()}
        started = now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=probe.bf16):
            work(model, batch)
        seconds = now(device) - started
        model.zero_grad(set_to_none=True)
        return seconds

    with torch.random.fork_rng():
        warming = 0.0
        for _ in range(probe.batches):
            warming += sum(seconds_of(work, 0) for work in works)
            if warming >= WARM_UP_S:  # after one, if a batch takes so long
                break
        turns = [[seconds_of(work, 1 + turn) for work in works] for turn in range(min(PROBE_BATCHES, probe.batches))]
    return [median(seconds) for seconds in zip(*turns, strict=True)]


# --- as many steps as there is time for -------------------------------------------------------------------------------


def steps_in_time(folder: Path, seconds_of: Callable[[int], float], left_s: float, *, resume: bool) -> int:
    """The most steps that are done and measured in time, on all processes as many.

    A run that is resumed keeps the number it began with, since its learning rate decays over so many.

    Args:
        folder: of the run; the number is kept there.
        seconds_of: what so many steps and their measurements take; more never take less.
        left_s: seconds there are.

    Raises:
        TrainingError: not even one step is done in time.
    """
    kept = folder / STEPS_FILE
    if resume and kept.exists():
        return int(json.loads(kept.read_text(encoding="utf-8"))["steps"])
    steps = int(broadcast_object_list([most_steps(seconds_of, left_s)])[0])
    if not steps:
        raise TrainingError(
            f"{left_s / 60:.1f} of the minutes are left after texts were written and read, and one step and its "
            f"measurement take {seconds_of(1) / 60:.1f}; give more minutes, or less to write and to measure "
            "(max_rows, held_out, eval_new_tokens)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"steps": steps}), encoding="utf-8")
    return steps


def most_steps(seconds_of: Callable[[int], float], left_s: float) -> int:
    """The most steps that take no longer than that; 0: not even one does not."""
    return bisect_right(range(1, MOST_STEPS), left_s, key=seconds_of)
