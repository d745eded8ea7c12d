"""One call from a target and prompts to a drafter: `train_drafter`. The parts are in the other files of this folder."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)

from ..checkpoints import inspect_checkpoint
from ..checkpoints.card import RECORD_FILE
from ..drafter.drafter import Eagle31Drafter
from ..errors import count
from ..memory.plan import size_text
from ..targets.devices import quick_dtype
from ..texts.conversations import read_conversations, tables
from ..texts.rows import Conversation
from .data import Document, PackedDocuments, build_vocabulary, count_supervised, coverage, render_documents
from .measure import EvaluationPrompt, KnownText, evaluation_prompts, readers_of_text, write_texts
from .objectives import AcceptanceModel, DistillationModel, require_stage_two
from .preparation import is_small, load_target, make_drafter, precision_of_result, resolve, set_vocabulary, split_rows
from .progress import Counting, LiveProgress, StopRequest, is_first_process, open_folder, say
from .report import TrainingReport, differences, make_record, read_report, recipe_of
from .self_prompts import self_prompt_count, write_prompts
from .settings import TrainingSettings
from .trainer import RECIPE_FILE, DistillationTrainer, last_checkpoint, step_of
from .writing import data_file, regenerate

__all__ = ["TrainingReport", "TrainingSettings", "train_drafter"]

OBJECTIVES = {"1": DistillationModel, "2": AcceptanceModel}
"""By stage: the module that the trainer asks for a loss."""
STAGE_TWO_RATE = 0.1
"""Of the learning rate, in stage 2."""
WARMUP_SHARE = 0.03
MOST_GRADIENT_NORM = 0.5
PATIENCE = 5
"""Measurements without progress after which training stops."""
KEPT_CHECKPOINTS = 3  # the best, the last, and the one being written


def train_drafter(settings: TrainingSettings, *, console: Console | None = None) -> TrainingReport:
    """Make a drafter: let the target write its text, choose the draft vocabulary, train, measure, write.

    The plan is printed before the first step. The folder `settings.out` ends with the drafter in the published layout
    and `training_report.json`, from which its card is filled; beside them `stage1/` or `stage2/` holds checkpoints and
    `data/` the texts.

    Args:
        console: where progress is shown; default: standard error.

    Raises:
        TrainingError: data, disk or the run itself are unusable; rows and files are named.
        ConfigurationError: a setting makes no sense.
        CheckpointError, IncompatibleTargetError: the target or the drafter to start from cannot be used.
    """
    settings.check()
    console = console or Console(stderr=True)
    if not is_first_process():
        console = Console(quiet=True)
    open_folder(settings, console)
    # What cannot be read is told before a large target is loaded.
    if settings.drafter is not None:
        inspect_checkpoint(settings.drafter)
    for source in (*settings.prompts, *settings.held_out):
        if self_prompt_count(source) is None:
            list(tables(source))
    set_seed(settings.seed)
    with StopRequest(console, settings.out) as stop, warnings.catch_warnings():
        # Norms of a float32 drafter read bfloat16 under autocast: a slower kernel, but of a small part of the work.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        with console.status("loading the target"):
            target, tokenizer = load_target(settings)
        report = Run(settings, target, tokenizer, console, stop).execute()
    leave_process_group()
    return report


class Run:
    """One run: what it works with, and each part of it in its order."""

    def __init__(
        self,
        given: TrainingSettings,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
        stop: StopRequest,
    ):
        self.settings = resolve(given, target)
        self.target, self.tokenizer, self.console, self.stop = target, tokenizer, console, stop
        self.stage = f"stage{given.stage}"
        self.folder = given.out / self.stage
        self.checkpoint = last_checkpoint(self.folder) if given.resume else None
        is_quick = target.dtype == torch.bfloat16 == quick_dtype(torch.bfloat16, target.device)
        self.bf16 = is_quick and target.device.type != "mps"  # which Trainer refuses
        # Who has written its share waits for the slowest: hours, where a large target writes long answers.
        self.processes = PartialState(cpu=target.device.type == "cpu", timeout=timedelta(days=1))
        self.rank = self.processes.process_index
        self.rows_per_step = self.settings.batch_rows * self.settings.accumulate * self.processes.num_processes
        self.recipe = self._recipe()

    def execute(self) -> TrainingReport:
        settings = self.settings
        steps = settings.max_steps
        if earlier := self._finished(steps):
            return earlier
        drafter = make_drafter(settings, self.target)  # before hours of writing: what does not fit shall not cost that
        documents, prompts = self.read_texts()
        counts = count_supervised(documents, self.target.config.get_text_config().vocab_size)
        if settings.drafter is None:
            set_vocabulary(drafter, self.target, build_vocabulary(counts, settings.draft_vocab_size))
        dataset = PackedDocuments(documents, settings.max_length, seed=settings.seed)
        if steps is None:
            steps = max(1, math.floor(settings.epochs * len(dataset) / self.rows_per_step))
            if earlier := self._finished(steps):
                return earlier
        if settings.stage == "2":
            require_stage_two(self.target, documents, settings.temperature)
        # Beside a small target computing logits twice takes a tenth of a step; beside a large one they fill the card.
        model = OBJECTIVES[settings.stage](drafter, steps=settings.ttt_steps, keeps_logits=is_small(self.target))
        known = self._known_texts(drafter, prompts)
        plan = self._plan(model, dataset, counts, len(prompts), steps)
        stage = self._train(model, dataset, known, plan)
        report = TrainingReport(settings.out, make_record(plan, stage, settings, self.recipe))
        self._write(drafter, report)
        return report

    def _recipe(self) -> dict[str, Any]:
        """The options that decide what is learned, and which of them have `changed` since the first step."""
        recipe, changed = recipe_of(self.settings), []
        if self.checkpoint is not None and (file := self.checkpoint / RECIPE_FILE).exists():  # else of an older version
            earlier = json.loads(file.read_text(encoding="utf-8"))
            changed = earlier["changed"]
            if others := differences(earlier["recipe"], recipe):
                say(self.console, f"changed   {others}")
                changed.append(f"from step {step_of(self.checkpoint) + 1:,} on {others}")
        return {"recipe": recipe, "changed": changed}

    def _finished(self, steps: int | None) -> TrainingReport | None:
        """What an earlier run made that did so many steps."""
        earlier = read_report(self.settings.out) if self.settings.resume else None
        if earlier is None or steps is None:
            return None
        done = earlier.record["plan"]["steps"]
        if earlier.record["stages"][0]["name"] != self.stage or done < steps:
            return None
        say(self.console, f"finished  by an earlier run of {count(done, 'step')}; nothing is trained or written")
        return earlier

    # --- texts ---------------------------------------------------------------------------------------------------

    def read_texts(self) -> tuple[list[Document], list[EvaluationPrompt]]:
        """Documents to train on and prompts to measure on; says what was left out and why."""
        settings = self.settings
        conversations = self._read_prompts()
        if settings.held_out:
            held_out = self._read(settings.held_out)
        else:
            held_out, conversations = split_rows(conversations, settings.seed)
        prompts = evaluation_prompts(held_out, self.tokenizer)
        written = self._regenerate(conversations)
        documents, counts = render_documents(
            written, self.tokenizer, max_length=settings.max_length, learns_all=is_small(self.target)
        )
        rewritten = counts.pop("rewritten", 0)
        counts["with a context too long to answer"] = len(conversations) - len(written)
        read = count(len(documents) - rewritten, "conversation")
        if rewritten:
            read += f" and {count(rewritten, 'turn')} that the template rewrites later"
        if counts.total():
            read += f" ({', '.join(f'{number:,} {what}' for what, number in counts.items() if number)})"
        say(self.console, f"text      {read}, {len(held_out):,} to measure on")
        return documents, prompts

    def _read_prompts(self) -> list[Conversation]:
        """Rows of files and the Hub, and those that the target writes itself."""
        settings = self.settings
        files = [source for source in settings.prompts if self_prompt_count(source) is None]
        written = sum(self_prompt_count(source) or 0 for source in settings.prompts)
        rows = self._read(files) if files else []
        return rows + (self._self_prompts(written) if written else [])

    def _read(self, sources: Sequence[str]) -> list[Conversation]:
        """Conversations of files and the Hub; empty rows are left out, and said."""
        empty: list[str] = []
        rows = read_conversations(sources, limit=self.settings.max_rows, on_empty=empty.append)
        if empty:
            say(self.console, f"rows      {len(empty):,} without any text left out, the first: {empty[0]}")
        return rows

    def _self_prompts(self, number: int) -> list[Conversation]:
        """Each process writes its share; what several wrote alike is kept once."""
        settings = self.settings
        share = len(self._share(range(number)))
        path = data_file(settings.out, "prompts", self.rank)
        seed = settings.seed * self.processes.num_processes + self.rank
        with Counting(self.console, "the target writes prompts", share) as counting:
            mine = write_prompts(
                self.target, self.tokenizer, path, share, write_rows=settings.write_rows, seed=seed,
                on_progress=counting.count,
            )  # fmt: skip
        return list({row.messages[0]["content"]: row for row in gather_object(mine)}.values())

    def _regenerate(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        settings = self.settings
        if settings.regenerate == "none":
            return list(conversations)
        path = data_file(settings.out, "conversations", self.rank)
        mine = self._share(conversations)
        with Counting(self.console, "the target writes answers", len(mine)) as counting:
            written = regenerate(mine, self.target, self.tokenizer, path, settings, on_progress=counting.count)
        in_order = zip_longest(*gather_object([written]))  # as `_share` has dealt them out
        return [each for of_all in in_order for each in of_all if each is not None]

    def _share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Those that this process writes for."""
        return items[self.rank :: self.processes.num_processes]

    def _known_texts(self, drafter: Eagle31Drafter, prompts: list[EvaluationPrompt]) -> dict[float, list[KnownText]]:
        """This process's share of the texts by which drafters are measured: greedy ones, and of what is served."""
        mine = self._share(prompts)
        temperatures = tuple(dict.fromkeys((0.0, *self.settings.temperature)))
        if names := readers_of_text(self.target, temperatures[-1]):
            say(self.console, f"acceptance is measured on texts without what looks at the text (of {names})")
        with Counting(self.console, "the target writes held-out answers", len(temperatures) * len(mine)) as counting:
            return {
                temperature: write_texts(
                    drafter.binding, mine, temperature, max_new_tokens=self.settings.eval_new_tokens,
                    seed=self.settings.seed + self.rank, on_progress=counting.count,
                )
                for temperature in temperatures
            }  # fmt: skip

    # --- planning ------------------------------------------------------------------------------------------------

    def _plan(
        self, model: DistillationModel, dataset: PackedDocuments, counts: Tensor, prompts: int, steps: int
    ) -> dict[str, Any]:
        """Say what the run does; its figures for the record.

        Args:
            counts: how often each token is learned, `(V,)`.
            prompts: that acceptance is measured on.
        """
        tokens = sum(len(document.input_ids) for document in dataset.documents)
        learned, covered = int(counts.sum()), coverage(counts, model.drafter.draft_ids)
        done = 0 if self.checkpoint is None else step_of(self.checkpoint)
        # of the best drafter, too: at the end, and where a run is gone on with
        measurements = math.ceil((steps - done) / self.settings.eval_steps) + 1 + (done > 0)
        checkpoint = 12 * sum(each.numel() for each in model.parameters())  # bytes: float32, and two moments
        lines = (
            f"data      {count(tokens, 'token')} in {count(len(dataset), 'row')}",
            f"learned   {count(learned, 'token')}, {covered:.2%} of them can be drafted",
            f"steps     {steps:,}" + f", {done:,} of them done" * (done > 0),
            f"measured  {measurements} x {count(prompts, 'prompt')}",
            f"disk      {size_text(KEPT_CHECKPOINTS * checkpoint)}",
        )
        say(self.console, "\n".join(lines))
        return {
            "rows": len(dataset),
            "tokens": tokens,
            "supervised_tokens": learned,
            "coverage": covered,
            "tokens_per_step": tokens / len(dataset) * self.rows_per_step,
            "steps": steps,
            "prompts": prompts,
        }

    # --- training ------------------------------------------------------------------------------------------------

    def _train(
        self,
        model: DistillationModel,
        dataset: PackedDocuments,
        known: dict[float, list[KnownText]],
        plan: dict[str, Any],
    ) -> dict[str, Any]:
        """Train from where an earlier run was left; what the record says of it."""
        counting = Counting(self.console, "training", plan["steps"])
        patience = EarlyStoppingCallback(early_stopping_patience=PATIENCE)
        callbacks = [LiveProgress(counting), self.stop, patience]
        trainer = DistillationTrainer(
            model, self._arguments(plan["steps"]), dataset, known=known, recipe=self.recipe, callbacks=callbacks
        )
        trainer.remove_callback(PrinterCallback)  # its lines would tear ours apart
        with counting:
            outcome = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        state = trainer.state
        acceptance = trainer.measure()[0.0]  # of the best drafter, which training ends with
        return {
            "name": self.stage,
            "steps": state.global_step,
            "loss": outcome.training_loss,
            "acceptance": {
                kind: asdict(counts) | {"acceptance_length": counts.acceptance_length}
                for kind, counts in acceptance.items()
            },
            "curve": [
                {
                    "step": entry["step"],
                    "tokens": round(entry["step"] * plan["tokens_per_step"]),
                    "acceptance_length": entry["eval_acceptance_length"],
                }
                for entry in state.log_history
                if "eval_acceptance_length" in entry
            ],
        }

    def _arguments(self, steps: int) -> TrainingArguments:
        settings = self.settings
        eval_steps = min(settings.eval_steps, steps)
        return TrainingArguments(
            output_dir=str(self.folder),
            max_steps=steps,
            per_device_train_batch_size=settings.batch_rows,
            gradient_accumulation_steps=settings.accumulate,
            learning_rate=settings.learning_rate * (1.0 if settings.stage == "1" else STAGE_TWO_RATE),
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(WARMUP_SHARE * steps),
            max_grad_norm=MOST_GRADIENT_NORM,
            bf16=self.bf16,
            use_cpu=self.target.device.type == "cpu",
            eval_strategy="steps",
            eval_steps=eval_steps,
            eval_on_start=settings.drafter is not None and self.checkpoint is None,  # what it begins with
            save_strategy="steps",
            save_steps=eval_steps,
            save_total_limit=KEPT_CHECKPOINTS - 1,
            load_best_model_at_end=True,
            metric_for_best_model="served_length",
            greater_is_better=True,
            logging_steps=min(10, eval_steps),
            seed=settings.seed,
            remove_unused_columns=False,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )

    # --- result --------------------------------------------------------------------------------------------------

    def _write(self, drafter: Eagle31Drafter, report: TrainingReport) -> None:
        if not is_first_process():
            return
        settings, out = self.settings, self.settings.out
        drafter.eval().to(precision_of_result(settings, self.target))  # type: ignore[call-arg]
        drafter.name_target(settings.target_id or settings.target)
        drafter.save_pretrained(out)
        (out / RECORD_FILE).write_text(json.dumps(report.record, indent=2), encoding="utf-8")


def leave_process_group() -> None:
    """Close the group and end its threads; without a group, do nothing.

    Call it when no name holds a trainer any more: a trainer's wrapped model keeps the group's threads alive, and a
    gloo thread that still holds a tensor when the interpreter ends aborts a process that has done all its work.
    """
    gc.collect()  # a trainer is part of cycles
    PartialState().destroy_process_group()
