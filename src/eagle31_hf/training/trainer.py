"""Stage 1: distillation by training-time test, on `transformers.Trainer`.

    loss = sum_s decay^s * sum_i loss(q_{i,s}, p_{i,s}) / supervised tokens

The divisor counts the whole optimiser step, over accumulated batches and processes alike, so that neither changes what
is learned. Checkpoints hold the drafter in the published layout (float32, so that resuming is exact) beside the
optimiser, schedule and random states that `Trainer` keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints import read_checkpoint, write_checkpoint
from ..drafter.drafter import Eagle31Drafter
from ..errors import CheckpointError, CheckpointFormatError, TrainingError, first_line
from ..stats import Acceptance
from ..targets.devices import quick_dtype
from .data import PackedBatch
from .measure import KnownText, acceptance_along
from .objectives import DistillationModel, Losses

DRAFT_TOKENS = 5
"""Of a round where acceptance is measured."""
RECIPE_FILE = "recipe.json"
"""In a checkpoint: the options that its steps were done with, and which of them changed when (`train.Run`)."""


class DistillationTrainer(Trainer):
    """`Trainer` that saves drafters, measures acceptance and stops at the first loss that is NaN or infinite.

    Args:
        args: of `transformers`; acceptance is measured every `args.eval_steps`.
        train_dataset: packed rows.
        known: by temperature, texts of the held-out prompts that acceptance is measured on, those of this process.
        recipe: what the steps are done with, for the run that goes on from a checkpoint.
    """

    model: DistillationModel

    def __init__(
        self,
        model: DistillationModel,
        args: TrainingArguments,
        train_dataset: Any,
        *,
        known: dict[float, list[KnownText]],
        recipe: dict[str, Any] | None = None,
        callbacks: list[Any] | None = None,
    ):
        self.known, self.recipe = known, recipe
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=list(known.values()),
            data_collator=default_collate,
            callbacks=callbacks,
            optimizers=(MuonWithAdamW(model, lr=args.learning_rate), None),
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
        """The batch's share of the optimiser step's loss."""
        output: Losses = model(**inputs)
        # DDP averages gradients over processes; the divisor already counts all of them.
        loss = output.loss * self.accelerator.num_processes / num_items_in_batch
        if not bool(loss.isfinite()):
            raise TrainingError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}; training stopped and {self._kept()}. "
                "Go on with --resume and a lower --learning-rate"
            )
        self._accuracy = output.correct / output.counts.clamp(min=1)
        return (loss, output) if return_outputs else loss

    def _kept(self) -> str:
        good = last_checkpoint(Path(str(self.args.output_dir)))
        return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """As `Trainer`, with the teacher-forced accuracy of each draft step in the last batch."""
        if "loss" in logs:
            logs["accuracy"] = self._accuracy.tolist()
        super().log(logs, start_time)

    # --- acceptance ----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Acceptance on known texts: of greedy ones by position; at each temperature its length."""
        measured = self.measure()
        greedy = Acceptance.of(measured[0.0].values())
        lengths = served_lengths(measured)
        metrics = {
            "eval_acceptance_length": greedy.acceptance_length,
            "eval_acceptance_at": greedy.cumulative_acceptance,
            "eval_served_lengths": lengths,
            "eval_served_length": geometric_mean(lengths.values()),
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self) -> dict[float, dict[str, Acceptance]]:
        """Counts by temperature and kind of prompt, of the texts of all processes; the same on each."""
        mine = {key: acceptance_along(self.model.drafter, texts, DRAFT_TOKENS) for key, texts in self.known.items()}
        gathered = gather_object([mine])
        return {key: _together([each[key] for each in gathered]) for key in mine}

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As `Trainer`; of checkpoints that measure alike the last is kept, which has learned most."""
        is_new = super()._determine_best_metric(metrics, trial)
        if metrics["eval_served_length"] == self.state.best_metric:
            self.state.best_global_step = self.state.global_step
        return is_new

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As `Trainer`."""
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, CheckpointError, SafetensorError, RuntimeError) as error:  # the last is torch's
            raise TrainingError(
                f"the checkpoint at step {self.state.global_step} cannot be written ({first_line(error)}); training "
                f"stopped and {self._kept()}. Go on with --resume, when there is room on the disk if that was missing"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """The drafter in the published layout, at training precision."""
        assert state_dict is None, "a drafter is never sharded: every process holds all of it"
        folder = Path(output_dir or str(self.args.output_dir))
        write_checkpoint(self.model.drafter.to_checkpoint(), folder)
        (folder / RECIPE_FILE).write_text(json.dumps(self.recipe), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As `Trainer`, at this run's learning rates: a checkpoint brings those of the run that wrote it."""
        optimizer: Any = self.optimizer
        schedule: Any = self.lr_scheduler
        rates = [group["initial_lr"] for group in optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] *= rate / group["initial_lr"]
            group["initial_lr"] = rate
        schedule.load_state_dict(schedule.state_dict() | {"base_lrs": rates})
        self._measure_best_again(checkpoint)

    def _measure_best_again(self, checkpoint: str | None) -> None:
        """What is best so far, on this run's texts: other options or edited rows make others, with other figures."""
        best = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if checkpoint is not None and best.is_dir():
            copy_weights(best, self.model.drafter)
            self.state.best_metric = geometric_mean(served_lengths(self.measure()).values())
            copy_weights(Path(checkpoint), self.model.drafter)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        copy_weights(Path(resume_from_checkpoint), self.model.drafter)

    def _load_best_model(self) -> None:
        copy_weights(Path(str(self.state.best_model_checkpoint)), self.model.drafter)


def _together(several: Sequence[dict[str, Acceptance]]) -> dict[str, Acceptance]:
    """The counts of each kind of prompt, summed."""
    kinds = sorted({kind for each in several for kind in each})
    return {kind: Acceptance.of(each.get(kind) for each in several) for kind in kinds}


def served_lengths(measured: dict[float, dict[str, Acceptance]]) -> dict[float, float]:
    """Acceptance length at each temperature; a checkpoint is chosen by their geometric mean, each by its own scale."""
    return {temperature: Acceptance.of(kinds.values()).acceptance_length for temperature, kinds in measured.items()}


def copy_weights(folder: Path, drafter: Eagle31Drafter) -> None:
    """Load the checkpoint in `folder` into the drafter's own parameters, which an optimiser may hold."""
    try:
        drafter.load_canonical(read_checkpoint(folder).tensors, assign=False)
    except CheckpointFormatError as error:
        raise TrainingError(
            f"the checkpoint {folder} is of another drafter than these settings make; resume with those it was made "
            "with, or start in a new folder"
        ) from error


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`.

    `Trainer` writes its state last, so a checkpoint cut short by a kill or a full disk has none that can be read.
    """
    found = (path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if re.fullmatch(r"[a-z]+-\d+", path.name))
    return max(filter(_is_complete, found), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step behind which it was written."""
    return int(checkpoint.name.rpartition("-")[2])


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).exists() for name in ("model.safetensors", "config.json"))


# --- the optimiser ----------------------------------------------------------------------------------------------------

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
        drafter: whose trainable parameters are stepped.
        lr: of AdamW, a tenth of Muon's.
    """

    def __init__(self, drafter: nn.Module, *, lr: float):
        trained = [(name, each) for name, each in drafter.named_parameters() if each.requires_grad]
        is_matrix = {name: each.ndim == 2 and not re.search("lm_head|embed_tokens", name) for name, each in trained}
        matrices = {"params": [each for name, each in trained if is_matrix[name]], "lr": 10 * lr}
        rest = {"params": [each for name, each in trained if not is_matrix[name]], "lr": lr}
        super().__init__([matrices, rest], lr=lr, betas=ADAM_BETAS, weight_decay=0.0)

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
