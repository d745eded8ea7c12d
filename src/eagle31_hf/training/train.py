"""One call from a target and prompts to a drafter: `train_drafter`. The parts are in the other files of this folder."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
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
from ..errors import TrainingError
from ..stats import Acceptance
from .data import Documents, PackedDocuments
from .measure import KnownTexts, served_processing, write_texts
from .objectives import AcceptanceModel, DistillationModel, require_stage_two
from .plan import StagePlan, TrainingPlan, checkpoint_bytes, time_measurement, time_step, training_bytes
from .preparation import Preparation, load_target, multiplies_bfloat16, precision_of_result, resolve
from .progress import Counting, LiveProgress, say
from .record import learning_curve, make_record, target_name
from .settings import TrainingSettings
from .stopping import RESULT_FILE, StopRequest, describe_kept, remove_run, telling_what_is_kept
from .trainer import DRAFT_TOKENS, DistillationTrainer, copy_weights, last_checkpoint
from .writing import own_temperature, require_disk

STAGE_TWO_SHARE = 0.25
"""Of the steps, where both stages are run."""
WARMUP_SHARE = 0.03
MOST_GRADIENT_NORM = 0.5
MOST_STEPS = 2**40
PATIENCE = 5
"""Measurements without progress after which training stops."""
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
        figures = {"name": self.name, "steps": self.steps, "loss": self.loss, "acceptance": acceptance}
        return {**figures, "curve": list(self.curve)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> StageResult:
        """What `to_dict` gave."""
        acceptance = {}
        for category, figures in stored["acceptance"].items():
            counts = {each.name: figures[each.name] for each in fields(Acceptance) if each.name in figures}
            acceptance[category] = Acceptance(**counts)
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
    elif settings.fresh and is_first_process():
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
        given: TrainingSettings,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
        stop: StopRequest,
    ):
        self.stop = stop
        self.given, self.settings = given, resolve(given, target)
        self.precision = precision_of_result(given, target)
        self.target, self.tokenizer, self.console = target, tokenizer, console
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))  # as `accelerate launch` says
        self.started = time.monotonic()

    def execute(self) -> TrainingReport:
        settings = self.settings
        preparation = Preparation(settings, self.target, self.tokenizer, self.console)
        # After the processes have met, which all take the first one's answer.
        self.bf16 = self.target.dtype == torch.bfloat16 and multiplies_bfloat16(self.target.device)
        drafter = preparation.make_drafter()
        data = preparation.read_texts()
        documents, self.prompts = data.documents.documents, data.prompts
        coverage = preparation.cover(drafter, documents)
        self.dataset = PackedDocuments(documents, settings.max_length, seed=settings.seed)
        if settings.stage != "1":
            require_stage_two(self.target, documents, settings.temperature)
        self.known = self._known_texts(drafter)
        plan = self._plan(drafter, data.documents, coverage)
        say(self.console, str(plan))
        stages: list[StageResult] = []
        self.trains = False  # whether this run does a step
        for planned in plan.stages:
            model = self._model(planned.name, drafter)
            if settings.stage == "2":  # what it begins with, measured as its result will be
                measured = self._trainer(planned.name, model, 1).measure_best()
                stages.append(StageResult("before", 0, float("nan"), measured))
            result = self._train(planned.name, model, planned.steps)
            curve = learning_curve(settings.out / planned.name, plan.tokens_per_step)
            stages.append(replace(result, curve=tuple(curve)))
        report = TrainingReport(settings.out, plan, tuple(stages))
        self._write(drafter, report)
        return report

    def _model(self, stage: str, drafter: Eagle31Drafter) -> DistillationModel:
        """What is trained, beginning with the drafter as it is now."""
        kind = DistillationModel if stage == "stage1" else AcceptanceModel
        settings = self.settings
        return kind(drafter, steps=settings.ttt_steps, gradient_checkpointing=settings.gradient_checkpointing)

    def _known_texts(self, drafter: Eagle31Drafter) -> list[KnownTexts]:
        """This process's share of the texts by which drafters are measured: greedy ones, and of what is served."""
        settings, rank = self.settings, PartialState().process_index
        mine = self.prompts[rank :: self.processes]
        temperatures = tuple(dict.fromkeys((0.0, *(settings.temperature or (own_temperature(self.target),)))))
        served = served_processing(self.target, temperatures[-1])
        if not served.fits_draft_vocabulary:
            names = ", ".join(type(processor).__name__ for processor in served.processors)
            say(self.console, f"acceptance is measured on texts without what looks at the text (of {names})")
        known: list[KnownTexts] = []
        with Counting(self.console, "the target writes texts to measure on", len(temperatures) * len(mine)) as counting:
            for temperature in temperatures:
                known.append(
                    write_texts(
                        drafter.binding, mine, temperature, max_new_tokens=settings.eval_new_tokens,
                        seed=settings.seed + rank, on_progress=counting.advance,
                    )
                )  # fmt: skip
        return known

    # --- planning ------------------------------------------------------------------------------------------------

    def _plan(self, drafter: Eagle31Drafter, documents: Documents, coverage: float) -> TrainingPlan:
        settings, dataset = self.settings, self.dataset
        rows_per_step = settings.batch_rows * settings.accumulate * self.processes
        rows = [dataset[index % len(dataset)] for index in range(settings.batch_rows)]
        disk = checkpoint_bytes(drafter, KEPT_CHECKPOINTS)
        require_disk(settings.out, disk, f"keeping {KEPT_CHECKPOINTS} checkpoints")
        step_s = {
            name: settings.accumulate * time_step(self._model(name, drafter), rows, bf16=self.bf16)
            for name in self._shares()
        }
        steps = settings.max_steps or max(1, math.floor(settings.epochs * len(dataset) / rows_per_step))
        plan = TrainingPlan(
            rows=len(dataset),
            tokens=documents.tokens,
            supervised_tokens=documents.supervised_tokens,
            coverage=coverage,
            rows_per_step=rows_per_step,
            stages=self._stages(steps, step_s),
            measurement_s=time_measurement(drafter, self.known, DRAFT_TOKENS),
            prompts=len(self.prompts),
            disk_bytes=disk,
            training_bytes=training_bytes(self._model("stage1", drafter), settings.batch_rows * settings.max_length),
        )
        return plan if settings.minutes is None else replace(plan, stages=self._stages_in_time(plan, step_s))

    def _shares(self) -> dict[str, float]:
        """The stages to be run, and what each has of the steps."""
        if self.settings.stage == "both":
            return {"stage1": 1 - STAGE_TWO_SHARE, "stage2": STAGE_TWO_SHARE}
        return {f"stage{self.settings.stage}": 1.0}

    def _stages(self, steps: int, step_s: Mapping[str, float]) -> tuple[StagePlan, ...]:
        """The stages to be run, of so many steps together; stage 2 alone begins with a measurement."""
        settings = self.settings
        counts = {name: max(1, round(share * steps)) for name, share in self._shares().items()}
        return tuple(
            StagePlan(name, count, step_s[name], count // min(settings.eval_steps, count) + (settings.stage == "2"))
            for name, count in counts.items()
        )

    def _stages_in_time(self, plan: TrainingPlan, step_s: Mapping[str, float]) -> tuple[StagePlan, ...]:
        """As many steps as are done and measured in the minutes; a resumed run keeps what it began with.

        Its learning rate decays over so many.
        """
        first, share = next(iter(self._shares().items()))
        begun = last_checkpoint(self.settings.out / first) if self.settings.resume else None
        if begun is not None:
            state = json.loads((begun / "trainer_state.json").read_text(encoding="utf-8"))
            return self._stages(round(state["max_steps"] / share), step_s)
        left_s = 60.0 * (self.settings.minutes or 0.0) - (time.monotonic() - self.started)

        def seconds_of(count: int) -> float:
            return replace(plan, stages=self._stages(count, step_s)).total_s

        steps = int(broadcast_object_list([bisect_right(range(1, MOST_STEPS), left_s, key=seconds_of)])[0])
        if not steps:
            raise TrainingError(
                f"{left_s / 60:.1f} of the minutes are left after texts were written and read, and one step and its "
                f"measurement take {seconds_of(1) / 60:.1f}; give more minutes, or less to write and to measure "
                "(max_rows, held_out, eval_new_tokens)"
            )
        return self._stages(steps, step_s)

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
            warmup_steps=math.ceil(WARMUP_SHARE * steps),
            max_grad_norm=MOST_GRADIENT_NORM,
            bf16=self.bf16,
            use_cpu=self.target.device.type == "cpu",
            eval_strategy="steps",
            eval_steps=eval_steps,
            save_strategy="steps",
            save_steps=eval_steps,
            save_total_limit=KEPT_CHECKPOINTS - 1,
            load_best_model_at_end=True,
            metric_for_best_model="served_length",
            greater_is_better=True,
            logging_steps=min(10, eval_steps),
            report_to=settings.report_to,
            seed=settings.seed,
            remove_unused_columns=False,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )

    def _trainer(self, stage: str, model: DistillationModel, steps: int) -> DistillationTrainer:
        self.progress = LiveProgress(self.console, stage)
        trainer = DistillationTrainer(
            model,
            self._arguments(stage, steps),
            self.dataset,
            known=self.known,
            callbacks=[
                self.progress,
                self.stop,
                EarlyStoppingCallback(early_stopping_patience=PATIENCE),
            ],
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
        try:
            outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            self.progress.stop()
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
        record = make_record(settings, self.given, prompts=len(self.prompts)) | figures
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
