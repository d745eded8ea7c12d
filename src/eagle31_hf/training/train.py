"""One call from a target and prompts to a drafter: `train_drafter`. The parts are in the other files of this folder."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)

from ..checkpoints import inspect_checkpoint
from ..checkpoints.card import CARD_FILE, RECORD_FILE, fill_card
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, TrainingError
from ..stats import Acceptance
from ..trees.shape import DraftShape
from .data.regeneration import own_temperature, require_disk
from .data.rendering import Documents
from .distillation.evaluation import EvaluationSettings
from .distillation.known_texts import KnownTexts, served_processing, write_texts
from .distillation.trainer import DistillationTrainer, copy_weights, last_checkpoint
from .distillation.training_model import DistillationModel
from .plan import (
    Probe,
    StagePlan,
    TrainingPlan,
    checkpoint_bytes,
    steps_in_time,
    time_known_texts,
    time_measurement,
    time_step,
    time_token_loss,
    training_bytes,
)
from .preparation import Preparation
from .progress import Counting, LiveProgress, say
from .record import learning_curve, make_record, target_name
from .settings import TrainingSettings
from .setup import load_target, multiplies_bfloat16, precision_of_result, resolve
from .stopping import RESULT_FILE, StopRequest, describe_kept, remove_run, telling_what_is_kept
from .text_model import TextModel, require_written

KEPT_CHECKPOINTS = 3  # the best, the last, and the one being written


@dataclass(frozen=True)
class StageResult:
    """One stage: its name, optimiser steps done, last training loss and served acceptance by category.

    `curve` holds `step`, `tokens` seen, `acceptance_length` and its `standard_error` for each measurement.
    """

    name: str
    steps: int
    loss: float
    acceptance: dict[str, Acceptance]
    curve: tuple[dict[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures."""
        acceptance = {
            category: asdict(counts) | {"depth": len(counts.drafted_at), "acceptance_length": counts.acceptance_length}
            for category, counts in self.acceptance.items()
        }
        told = {"name": self.name, "steps": self.steps, "loss": self.loss, "acceptance": acceptance}
        return {**told, "curve": list(self.curve)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> StageResult:
        """What `to_dict` gave."""
        acceptance = {}
        for category, figures in stored["acceptance"].items():
            counts = {each.name: figures[each.name] for each in fields(Acceptance) if each.name in figures}
            acceptance[category] = Acceptance.of([Acceptance(**counts)])  # whose lists are tuples
        curve = tuple(stored.get("curve", ()))
        return cls(stored["name"], stored["steps"], stored["loss"], acceptance, curve)


@dataclass(frozen=True)
class TrainingReport:
    """What a run made: the drafter's folder, the plan it began with and the stages in order."""

    folder: Path
    plan: TrainingPlan
    stages: tuple[StageResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures."""
        return {
            "folder": str(self.folder),
            "plan": asdict(self.plan),
            "stages": [stage.to_dict() for stage in self.stages],
        }


def train_drafter(settings: TrainingSettings, *, console: Console | None = None) -> TrainingReport:
    """Make a drafter: let the target write its text, choose the draft vocabulary, distil, improve acceptance, write.

    The plan is printed before the first step. The folder `settings.out` ends with the drafter in the published layout,
    its card and `training_report.json`; beside them `stage1/`, `stage2/` hold checkpoints and `data/` the texts.

    Args:
        console: where progress is shown; default: standard error.

    Raises:
        TrainingError: data, features, disk or the run itself are unusable; rows and files are named.
        ConfigurationError: a setting makes no sense.
        CheckpointError, IncompatibleTargetError: the target or the drafter to start from cannot be used.
    """
    settings.check()
    console = console or Console(stderr=True)
    if not is_first_process():
        console = Console(quiet=True)
    out = settings.out
    if settings.resume and not out.is_dir():
        raise TrainingError(f"nothing to resume: there is no folder {out}; start without resume")
    kept = describe_kept(out)
    if settings.resume:
        say(console, f"resuming  {kept or 'an empty folder'}")
    elif kept and not settings.fresh:
        raise TrainingError(
            f"{out} holds an earlier run ({kept}); go on with --resume, begin anew with --fresh, or name another folder"
        )
    elif is_first_process():
        remove_run(out)
    if settings.drafter is not None:
        inspect_checkpoint(settings.drafter)  # before a large target is loaded
    set_seed(settings.seed)
    stop = StopRequest(console, waits=os.environ.get("WORLD_SIZE", "1") == "1")
    with telling_what_is_kept(out, console, stop), warnings.catch_warnings():
        # Norms of a float32 drafter read bfloat16 under autocast: a slower kernel, but of a small part of the work.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        target, tokenizer = load_target(settings)
        report = _Run(settings, target, tokenizer, console, stop).execute()
    leave_process_group()
    return report


class _Run:
    def __init__(
        self,
        told: TrainingSettings,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
        stop: StopRequest,
    ):
        self.stop = stop
        self.told, self.settings = told, resolve(told, target)
        self.precision = precision_of_result(told, target)
        self.target, self.tokenizer, self.console = target, tokenizer, console
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))  # as `accelerate launch` says
        self.started = time.monotonic()
        self.evaluation = EvaluationSettings(depth=told.draft_tokens, max_new_tokens=told.eval_new_tokens)

    def execute(self) -> TrainingReport:
        settings = self.settings
        preparation = Preparation(settings, self.target, self.tokenizer, self.console)
        # After the processes have met, which all take the first one's answer.
        self.bf16 = self.target.dtype == torch.bfloat16 and multiplies_bfloat16(self.target.device)
        drafter = preparation.make_drafter()
        data = preparation.read_texts()
        documents, self.prompts = data.documents.documents, data.prompts
        coverage = preparation.cover(drafter, documents)
        self.dataset: Any = preparation.make_dataset(drafter, documents)
        if settings.stage != "1":
            require_written(documents, f"stage is {settings.stage!r}")
        if settings.stage != "2" and settings.given_weight == 0:
            require_written(documents, "given_weight is 0")
        self.known = self._known_texts(drafter)
        plan = self._plan(drafter, data.documents, coverage)
        say(self.console, str(plan))
        stages: list[StageResult] = []
        self.trains = False  # whether this run does a step
        for planned in plan.stages:
            model = self._model(planned.name, drafter)
            if settings.stage == "2":  # what it begins with, measured as its result will be
                measured = self._trainer(planned.name, model, 1).measure()
                stages.append(StageResult("before", 0, float("nan"), measured))
            result = self._train(planned.name, model, planned.steps)
            curve = learning_curve(settings.out / planned.name, plan.tokens_per_step)
            stages.append(replace(result, curve=tuple(curve)))
        report = TrainingReport(settings.out, plan, tuple(stages))
        self._write(drafter, report)
        return report

    def _model(self, stage: str, drafter: Eagle31Drafter) -> DistillationModel:
        """What is trained, beginning with the drafter as it is now."""
        kind = DistillationModel if stage == "stage1" else TextModel
        model = kind(drafter, self.settings.to_distillation())
        model.gradient_checkpointing = self.settings.gradient_checkpointing
        return model

    def _known_texts(self, drafter: Eagle31Drafter) -> list[KnownTexts]:
        """This process's share of the texts by which checkpoints are chosen, of each temperature that is served.

        None where the target is served with processors that look at the text: `generate` has to tell then.
        """
        settings, rank = self.settings, PartialState().process_index
        mine = self.prompts[rank :: self.processes]
        temperatures = dict.fromkeys(settings.temperature or (own_temperature(self.target),))
        known: list[KnownTexts] = []
        with Counting(self.console, "the target writes texts to choose by", len(temperatures) * len(mine)) as counting:
            for temperature in temperatures:
                try:
                    served_processing(self.target, temperature)
                except ConfigurationError as error:
                    say(self.console, f"checkpoints are chosen by greedy acceptance alone: {error}")
                    return []
                known.append(
                    write_texts(
                        drafter.binding, mine, temperature, max_new_tokens=settings.eval_new_tokens,
                        seed=settings.seed + rank, on_prompts=counting.advance,
                    )
                )  # fmt: skip
        return known

    # --- planning ------------------------------------------------------------------------------------------------

    def _plan(self, drafter: Eagle31Drafter, documents: Documents, coverage: float) -> TrainingPlan:
        settings, dataset = self.settings, self.dataset
        accumulate = settings.accumulate
        rows_per_step = settings.batch_rows * accumulate * self.processes
        rows = [dataset[index] for index in range(min(len(dataset), 3 * settings.batch_rows))]
        model = self._model("stage1", drafter)
        disk = checkpoint_bytes(model, KEPT_CHECKPOINTS)
        require_disk(settings.out, disk, f"keeping {KEPT_CHECKPOINTS} checkpoints")
        whole = settings.max_steps or max(1, math.floor(settings.epochs * len(dataset) / rows_per_step))
        probe = Probe(rows, settings.batch_rows, self.bf16, batches=whole * accumulate)
        token_loss_s, bare_s = time_token_loss(model, probe)
        step_s = {"stage1": accumulate * token_loss_s}
        if settings.stage != "1":
            step_s["stage2"] = accumulate * time_step(self._model("stage2", drafter), probe)
        plan = TrainingPlan(
            rows=len(dataset),
            tokens=documents.tokens,
            supervised_tokens=documents.supervised_tokens,
            coverage=coverage,
            rows_per_step=rows_per_step,
            stages=self._stages(whole, step_s),
            measurement_s=(
                time_measurement(drafter, self.prompts[:: self.processes], self.evaluation)
                + time_known_texts(drafter, self.known, DraftShape(self.evaluation.depth))
            ),
            prompts=len(self.prompts),
            disk_bytes=disk,
            training_bytes=training_bytes(model, settings.batch_rows * settings.max_length),
            token_loss_s=step_s["stage1"],
            bare_s=accumulate * bare_s,
        )
        if settings.minutes is None:
            return plan
        left_s = 60.0 * settings.minutes - (time.monotonic() - self.started)
        steps = steps_in_time(
            settings.out,
            lambda count: replace(plan, stages=self._stages(count, step_s)).total_s,
            left_s,
            resume=settings.resume,
        )
        return replace(plan, stages=self._stages(steps, step_s))

    def _stages(self, steps: int, step_s: Mapping[str, float]) -> tuple[StagePlan, ...]:
        """The stages to be run, of so many steps together; stage 2 alone begins with a measurement."""
        settings = self.settings
        counts = {f"stage{settings.stage}": steps}
        if settings.stage == "both":
            second = min(max(1, round(steps * settings.stage2_share)), max(1, steps - 1))
            counts = {"stage1": max(1, steps - second), "stage2": second}
        return tuple(
            StagePlan(name, count, step_s[name], count // min(settings.eval_steps, count) + (settings.stage == "2"))
            for name, count in counts.items()
        )

    # --- training ------------------------------------------------------------------------------------------------

    def _arguments(self, stage: str, steps: int) -> TrainingArguments:
        settings = self.settings
        eval_steps = min(settings.eval_steps, steps)
        return TrainingArguments(
            output_dir=str(settings.out / stage),
            max_steps=steps,
            per_device_train_batch_size=settings.batch_rows,
            gradient_accumulation_steps=settings.accumulate,
            learning_rate=settings.learning_rate * (0.1 if stage == "stage2" else 1.0),
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(settings.warmup_share * steps),
            max_grad_norm=settings.max_grad_norm,
            bf16=self.bf16,
            use_cpu=self.target.device.type == "cpu",
            eval_strategy="steps",
            eval_steps=eval_steps,
            save_strategy="steps",
            save_steps=eval_steps,
            save_total_limit=KEPT_CHECKPOINTS - 1,
            load_best_model_at_end=True,
            metric_for_best_model="served_length" if self.known else "acceptance_length",
            greater_is_better=True,
            logging_steps=min(10, eval_steps),
            report_to=settings.report_to,
            seed=settings.seed,
            remove_unused_columns=False,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )

    def _trainer(self, stage: str, model: DistillationModel, steps: int) -> DistillationTrainer:
        progress = LiveProgress(self.console, stage)
        trainer = DistillationTrainer(
            model,
            self._arguments(stage, steps),
            self.dataset,
            prompts=self.prompts,
            evaluation=self.evaluation,
            optimizer_name=self.settings.optimizer,
            callbacks=[progress, self.stop, EarlyStoppingCallback(early_stopping_patience=self.settings.patience)],
            on_measured=progress.measuring,
            known=self.known,
        )
        trainer.remove_callback(PrinterCallback)  # its lines would tear ours apart
        return trainer

    def _train(self, stage: str, model: DistillationModel, steps: int) -> StageResult:
        """One stage, from where it was left; one that was finished is trained again only for more steps."""
        folder = self.settings.out / stage
        if self.settings.resume and self.trains and stage == "stage2":
            shutil.rmtree(folder, ignore_errors=True)  # it went on from another stage 1
        stored = folder / RESULT_FILE
        if self.settings.resume and stored.exists():
            figures = json.loads(stored.read_text(encoding="utf-8"))
            planned = figures.get("planned_steps", figures["steps"])
            if steps <= planned:
                say(self.console, f"{stage}    was finished by an earlier run of {planned:,} steps; nothing is trained")
                copy_weights(folder, model.drafter)
                return StageResult.from_dict(figures)
            say(self.console, f"{stage}    goes on from the {planned:,} steps of an earlier run to {steps:,}")
        self.trains = True
        trainer = self._trainer(stage, model, steps)
        checkpoint = last_checkpoint(folder) if self.settings.resume else None
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        self.stop.leave()
        result = StageResult(stage, trainer.state.global_step, outcome.training_loss, trainer.measure_best())
        trainer.save_model(str(folder))
        if trainer.is_world_process_zero():
            stored.write_text(json.dumps(result.to_dict() | {"planned_steps": steps}), encoding="utf-8")
        return result

    # --- result --------------------------------------------------------------------------------------------------

    def _write(self, drafter: Eagle31Drafter, report: TrainingReport) -> None:
        if not is_first_process():
            return
        settings = self.settings
        drafter.eval().to(self.precision)  # type: ignore[call-arg]
        # Where it is to be found, but nobody else has this machine's folders.
        drafter.name_target(settings.target_id or (target_name(settings) if settings.push else settings.target))
        drafter.save_pretrained(settings.out)
        figures = {name: value for name, value in report.to_dict().items() if name != "folder"}
        record = make_record(settings, self.told, prompts=len(self.prompts)) | figures
        if not self.trains and (settings.out / RECORD_FILE).exists():  # the weights are those of the run told there
            record = json.loads((settings.out / RECORD_FILE).read_text(encoding="utf-8"))
            record["license"] = settings.license or record.get("license")
        (settings.out / RECORD_FILE).write_text(json.dumps(record, indent=2), encoding="utf-8")
        repository = settings.push or settings.out.resolve().name
        (settings.out / CARD_FILE).write_text(fill_card(settings.out, repository), encoding="utf-8")
        if settings.push is not None:
            drafter.save_pretrained(settings.out, push_to_hub=True, repo_id=settings.push)


__all__ = ["StageResult", "TrainingReport", "TrainingSettings", "train_drafter"]


def is_first_process() -> bool:
    """The one that writes and speaks; `accelerate launch` numbers them here before anything is loaded."""
    return os.environ.get("RANK", "0") == "0"


def leave_process_group() -> None:
    """Close the group and end its threads; without a group, do nothing.

    Call it when no name holds a trainer any more: a trainer's wrapped model keeps the group's threads alive, and a
    gloo thread that still holds a tensor when the interpreter ends aborts a process that has done all its work.
    """
    gc.collect()  # a trainer is part of cycles
    PartialState().destroy_process_group()
