"""Stage 1: distillation by training-time test, on `transformers.Trainer`.

    loss = sum_s decay^s * sum_i loss(q_{i,s}, p_{i,s}) / supervised tokens

The divisor counts the whole optimiser step, over accumulated batches and processes alike, so that neither changes what
is learned. Checkpoints hold the drafter in the published layout (float32, so that resuming is exact) beside the
optimiser, schedule and random states that `Trainer` keeps.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints import read_checkpoint, write_checkpoint
from ..drafter.drafter import Eagle31Drafter
from ..errors import CheckpointError, TrainingError, first_line
from ..stats import Acceptance
from .data import PackedBatch, collate
from .measure import (
    KnownTexts,
    TextRounds,
    acceptance_length,
    acceptance_of,
    paired_error,
    rounds_of,
    served_error,
    served_length,
)
from .objectives import DistillationModel, LossOutput
from .optimizers import make_optimizer

DRAFT_TOKENS = 5
"""Of a round where acceptance is measured."""


class DistillationTrainer(Trainer):
    """`Trainer` that saves drafters, measures acceptance and stops at the first loss that is NaN or infinite.

    Args:
        args: of `transformers`; acceptance is measured every `args.eval_steps`.
        train_dataset: packed rows.
        known: texts of the held-out prompts that acceptance is measured on, those of this process; greedy ones first.
    """

    model: DistillationModel

    def __init__(
        self,
        model: DistillationModel,
        args: TrainingArguments,
        train_dataset: Any,
        *,
        known: Sequence[KnownTexts],
        callbacks: list[Any] | None = None,
    ):
        self.known = known
        self._running: Any = Counter()  # figures since the last log, summed
        self._rounds: dict[int | None, list[list[TextRounds]]] = {}  # by step and temperature
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=list(known) or None,
            data_collator=collate,
            callbacks=callbacks,
        )

    # --- loss ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimiser step, and how much their positions count for on all processes together."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = sum((self.model.counted(PackedBatch(**batch)).sum() for batch in batches), torch.tensor(0.0)).to(device)
        count = self.accelerator.gather(count).sum()
        return batches, count.clamp(min=1.0)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's share of the optimiser step's loss.

        Raises:
            TrainingError: it is NaN or infinite.
        """
        output: LossOutput = model(**inputs)
        # DDP averages gradients over processes; the divisor already counts all of them.
        loss = output.loss * self.accelerator.num_processes / num_items_in_batch
        if not bool(loss.isfinite()):
            raise TrainingError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}; training stopped and {self._kept()}. "
                "Lower the learning rate, or resume from the checkpoint with another seed"
            )
        self._note(output)
        return (loss, output) if return_outputs else loss

    def _kept(self) -> str:
        good = last_checkpoint(Path(str(self.args.output_dir)))
        return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"

    def _note(self, output: LossOutput) -> None:
        self._running.update({"batches": 1.0, **output.figures})
        counts = output.steps.counts.clamp(min=1)
        for name, sums in (("accuracy", output.steps.correct), ("loss", output.steps.sums.detach())):
            means = (sums / counts).tolist()
            self._running.update({f"{name}_step_{step}": mean for step, mean in enumerate(means)})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, with loss and teacher-forced accuracy per draft step since the last log."""
        if "loss" in logs and self._running:
            batches = self._running.pop("batches")
            logs.update({name: value / batches for name, value in self._running.items()})
            self._running.clear()
        super().log(logs, start_time)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Muon and AdamW; see `optimizers`."""
        if self.optimizer is None:
            trained = self.model if model is None else model
            self.optimizer = make_optimizer(trained, self.args.learning_rate)
        return self.optimizer

    # --- acceptance ----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Acceptance on known texts: of greedy ones by position and category; at each temperature its length."""
        rounds = self._rounds[self.state.global_step] = self.measure()
        greedy = acceptance_of(rounds[0])
        figures = {
            "acceptance_length": acceptance_length(rounds[0]),
            "acceptance_error": paired_error(rounds[0]),
            **{f"acceptance_at_{position}": value for position, value in enumerate(greedy.cumulative_acceptance, 1)},
            **{f"acceptance_length_{kind}": each.acceptance_length for kind, each in by_category(rounds[0]).items()},
            "served_length": served_length(rounds),
            "served_error": served_error(rounds),
        }
        for texts, each in zip(self.known, rounds, strict=True):
            figures[f"served_length_at_{texts.temperature:g}"] = acceptance_length(each)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self) -> list[list[TextRounds]]:
        """Rounds by temperature, of the texts of all processes; the same on each."""
        mine = [rounds_of(self.model.drafter, texts, DRAFT_TOKENS) for texts in self.known]
        gathered = gather_object([mine])
        return [[text for rounds in of_one for text in rounds] for of_one in zip(*gathered, strict=True)]

    def measure_best(self) -> dict[str, Acceptance]:
        """Greedy acceptance by category of the drafter that training ended with: the last, or a better one."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        return by_category((self._rounds[best] if best in self._rounds else self.measure())[0])

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As `Trainer`.

        Raises:
            TrainingError: it cannot be written, for want of disk most often; earlier ones stay.
        """
        try:
            super()._save_checkpoint(model, trial)
        except TrainingError:
            raise
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's file writer raises the last
            raise TrainingError(
                f"the checkpoint at step {self.state.global_step} cannot be written ({first_line(error)}); "
                f"training stopped and {self._kept()}. Make room on the disk and go on with resume"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """The drafter in the published layout, at training precision.

        Raises:
            TrainingError: its weights are NaN or infinite; earlier checkpoints stay.
        """
        assert state_dict is None, "a drafter is never sharded: every process holds all of it"
        try:
            write_checkpoint(self.model.drafter.to_checkpoint(), Path(output_dir or str(self.args.output_dir)))
        except CheckpointError as error:
            if isinstance(error.__cause__, (OSError, SafetensorError)):
                raise error.__cause__ from None  # `_save_checkpoint` says what was kept
            raise TrainingError(f"the drafter at step {self.state.global_step} cannot be saved: {error}") from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        copy_weights(Path(resume_from_checkpoint), self.model.drafter)

    def _load_best_model(self) -> None:
        """The best drafter measured, unless the last one is within the standard error of the difference.

        Few prompts are measured on, and the last steps, at the lowest learning rates, are worth more than their luck.
        """
        assert self.state.best_model_checkpoint is not None, "Trainer asks only when there is one"
        if self._last_is_as_good_as_best():
            self.state.best_global_step = self.state.global_step
            return
        copy_weights(Path(self.state.best_model_checkpoint), self.model.drafter)

    def _last_is_as_good_as_best(self) -> bool:
        assert self.state.best_metric is not None, "there is a best checkpoint"
        for entry in reversed(self.state.log_history):
            if entry["step"] == self.state.global_step and "eval_served_error" in entry:
                best, last = (self._rounds.get(int(step or 0)) for step in (self.state.best_global_step, entry["step"]))
                # What an earlier run measured is not known text by text.
                error = served_error(last, best) if last and best else entry["eval_served_error"]
                return self.state.best_metric - entry["eval_served_length"] <= error
        return False


def by_category(rounds: Sequence[TextRounds]) -> dict[str, Acceptance]:
    """Counts of each kind of prompt."""
    kinds = sorted({text.category for text in rounds})
    return {kind: acceptance_of([text for text in rounds if text.category == kind]) for kind in kinds}


@torch.no_grad()
def copy_weights(folder: Path, drafter: Eagle31Drafter) -> None:
    """Load the checkpoint in `folder` into the drafter's own parameters, which an optimiser may hold.

    Raises:
        CheckpointError: it cannot be read.
        TrainingError: it is another drafter's; nothing was loaded.
    """
    stored = read_checkpoint(folder).tensors
    own = drafter.canonical_tensors()
    differing = sorted(
        name for name in stored.keys() | own.keys()
        if name not in stored or name not in own or stored[name].shape != own[name].shape
    )  # fmt: skip
    if differing:
        raise TrainingError(
            f"the checkpoint {folder} is another drafter's ({', '.join(differing[:4])} differ); resume with the "
            "settings it was made with, or start in a new folder"
        )
    for name, tensor in stored.items():
        own[name].copy_(tensor)  # views of the fused parameters
    drafter._draft_ids = None  # the head's rows are those of the vocabulary it was trained with


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`.

    `Trainer` writes its state last, so a checkpoint cut short by a kill or a full disk has none that can be read.
    """
    found = ((path.name.rpartition("-")[2], path) for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    complete = {int(step): path for step, path in found if step.isdigit() and _is_complete(path)}
    return complete[max(complete)] if complete else None


def _is_complete(checkpoint: Path) -> bool:
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return False
    return math.isfinite(step) and all((checkpoint / name).exists() for name in ("model.safetensors", "config.json"))
