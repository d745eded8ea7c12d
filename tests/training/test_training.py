"""The trainer: resuming, evaluation, which checkpoint is kept, runs gone bad, several processes, the optimiser."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_training import DRAFT_VOCABULARY, ROW, make_documents, make_drafter, make_target
from torch import nn
from transformers import LlamaConfig, TrainerCallback, TrainingArguments

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import TrainingError
from eagle31_hf.training import preparation as setup
from eagle31_hf.training.data import PackedDocuments
from eagle31_hf.training.measure import EvaluationPrompt, write_texts
from eagle31_hf.training.objectives import DistillationModel
from eagle31_hf.training.preparation import set_vocabulary
from eagle31_hf.training.progress import StopRequest
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import leave_process_group
from eagle31_hf.training.trainer import DistillationTrainer, MuonWithAdamW, copy_weights, last_checkpoint
from warm_processes import finish, start_group

MEASURED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "served_length",
}


def make_trainer(folder: Path, *, steps: int, batch: int = 2, accumulate: int = 1, **arguments):
    drafter = make_drafter(make_target())
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch, logging_steps=1,
        gradient_accumulation_steps=accumulate, report_to="none", disable_tqdm=True, use_cpu=True, seed=5,
        remove_unused_columns=False, lr_scheduler_type="cosine",
        **({"save_steps": 2, "learning_rate": 1e-2} | arguments),
    )  # fmt: skip
    prompts = [EvaluationPrompt([1, 5, 9], "a"), EvaluationPrompt([1, 7, 8, 4], "b")]
    prompts = prompts[args.process_index :: args.world_size]
    return DistillationTrainer(
        DistillationModel(drafter, steps=3),
        args,
        PackedDocuments(make_documents(30), ROW, seed=0),
        known={warmth: write_texts(drafter.binding, prompts, warmth, max_new_tokens=8) for warmth in (0.0, 1.0)},
    )


def losses_of(trainer: DistillationTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", steps=6)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    resumed = make_trainer(tmp_path / "whole", steps=6)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed) == losses_of(whole)
    assert len(set(losses_of(whole).values())) == 6
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    drafter = Eagle31Drafter.from_pretrained(checkpoint)  # a checkpoint is a drafter like any other
    assert drafter.config.draft_vocab_size == DRAFT_VOCABULARY


def test_a_resumed_run_learns_at_the_rate_it_is_given(tmp_path: Path) -> None:
    make_trainer(tmp_path, steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    rates = {}
    for rate in (1e-2, 5e-3):
        resumed = make_trainer(tmp_path / str(rate), steps=6, learning_rate=rate)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        logged = [entry for entry in resumed.state.log_history if "loss" in entry and entry["step"] > 2]
        rates[rate] = [entry["learning_rate"] for entry in logged]
    assert rates[5e-3] == pytest.approx([each / 2 for each in rates[1e-2]])
    assert max(rates[1e-2]) > 0


def test_training_fits_a_small_text(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=30, batch=4, save_strategy="no")
    trainer.train_dataset = PackedDocuments(make_documents(2), ROW, seed=0)
    trainer.train()
    found = losses_of(trainer)
    assert found[30] < 0.6 * found[1]


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    large = make_trainer(tmp_path / "large", steps=2, batch=4)
    small = make_trainer(tmp_path / "small", steps=2, batch=1, accumulate=4)
    large.train()
    small.train()
    assert losses_of(small)[2] == pytest.approx(losses_of(large)[2], rel=1e-4)


def test_checkpoints_are_chosen_by_known_texts_at_every_temperature(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=5, **MEASURED)
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_served_length" in entry]
    assert [entry["step"] for entry in measured] == [2, 4, 5], "also what was learned behind the last measurement"
    for entry in measured:
        lengths = list(entry["eval_served_lengths"].values())
        assert entry["eval_served_length"] == pytest.approx((lengths[0] * lengths[1]) ** 0.5)
        assert entry["eval_acceptance_length"] == lengths[0] >= 1.0
    assert list(trainer.measure()[0.0]) == ["a", "b"], "by kind of prompt"
    assert trainer.state.best_metric == max(entry["eval_served_length"] for entry in measured)


def test_training_ends_with_the_best_drafter(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=1)
    best = trainer.model.drafter.fc.weight.clone()
    trainer.save_model(str(tmp_path / "best"))
    trainer.model.drafter.fc.weight.data.zero_()
    trainer.state.best_model_checkpoint = str(tmp_path / "best")
    trainer._load_best_model()
    assert torch.equal(trainer.model.drafter.fc.weight, best)


def test_of_checkpoints_that_measure_alike_the_last_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=4, learning_rate=0.0, **MEASURED)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_a_resumed_run_measures_the_best_checkpoint_on_its_own_texts(tmp_path: Path) -> None:
    """They may be others than before, whose figures say nothing beside those to come."""
    whole, resumed = (make_trainer(tmp_path, steps=8, **MEASURED) for _ in range(2))
    whole.train()
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_metric": 99.0, "best_global_step": 2}))
    resumed.train(resume_from_checkpoint=str(state.parent))
    measured = {e["step"]: e["eval_served_length"] for e in resumed.state.log_history if "eval_served_length" in e}
    assert resumed.state.best_metric == max(measured[step] for step in (2, 6, 8))
    assert losses_of(resumed) == losses_of(whole), "it goes on with the weights of the last"


def test_nan_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=6)
    model = trainer.model

    class Poison(type(trainer.callback_handler.callbacks[0])):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with torch.no_grad():
                    model.drafter.fc.weight.fill_(float("nan"))

    trainer.add_callback(Poison())
    with pytest.raises(TrainingError, match=r"nan at step 4.*checkpoint-2"):
        trainer.train()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    Eagle31Drafter.from_pretrained(tmp_path / "checkpoint-2")


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=1)
    with torch.no_grad():
        trainer.model.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"step 0 cannot be written \(.*; training stopped and there is no check"):
        trainer._save_checkpoint(trainer.model, None)
    assert not list(tmp_path.rglob("config.json"))


def test_a_checkpoint_brings_its_draft_vocabulary_along(tmp_path: Path) -> None:
    """A resumed run may have chosen another one: its rows of data were edited."""
    trainer = make_trainer(tmp_path, steps=1)
    trainer.save_model(str(tmp_path))
    drafter = make_drafter(make_target())
    wanted = drafter.draft_ids.clone()
    set_vocabulary(drafter, make_target(), torch.arange(DRAFT_VOCABULARY))
    assert not torch.equal(drafter.draft_ids, wanted)
    copy_weights(tmp_path, drafter)
    assert torch.equal(drafter.draft_ids, wanted)


def test_a_checkpoint_cut_short_is_passed_over(tmp_path: Path) -> None:
    make_trainer(tmp_path, steps=4).train()
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-4-copy")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert last_checkpoint(tmp_path) is None


def test_another_drafters_checkpoint_is_refused(tmp_path: Path) -> None:
    other = Eagle31Drafter.from_target(make_target(), draft_vocab_size=11)
    other.save_pretrained(tmp_path / "checkpoint-2")
    trainer = make_trainer(tmp_path, steps=4)
    with pytest.raises(TrainingError, match="of another drafter than these settings make"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("told", "stored", "saved"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", None, torch.float32),  # what its weights were loaded in is all that is known
        ("auto", torch.int8, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
    ],
)
def test_a_drafter_is_saved_as_its_target_is_stored(
    told: str, stored: torch.dtype | None, saved: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.AutoConfig, "from_pretrained", lambda _: LlamaConfig(dtype=stored))
    settings = TrainingSettings("target", ("rows.jsonl",), Path("out"), dtype=told)
    assert setup.precision_of_result(settings, make_target()) is saved


class Signalled(TrainerCallback):
    """A signal comes within a step."""

    def __init__(self, number: int, step: int):
        self.number, self.step = number, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("signals", "raised", "kept"),
    [
        ([signal.SIGTERM], SystemExit, 3),  # no multiple of save_steps
        ([signal.SIGINT], KeyboardInterrupt, 3),
        ([signal.SIGTERM, signal.SIGTERM], SystemExit, 2),  # a second one ends the run at once
    ],
)
def test_a_signal_ends_the_run_behind_its_step_with_a_checkpoint(
    tmp_path: Path, signals: list[int], raised: type[BaseException], kept: int
) -> None:
    trainer, written = make_trainer(tmp_path, steps=5), io.StringIO()
    stop = StopRequest(Console(file=written), tmp_path)
    for callback in (stop, *(Signalled(number, step=2) for number in signals)):
        trainer.add_callback(callback)
    with pytest.raises(raised), stop:
        trainer.train()
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{kept}"
    assert "stopping after this step" in written.getvalue()


def stop_together(folder: Path, number: int) -> None:
    """A signal comes to the second of two processes alone."""
    trainer = make_trainer(folder, steps=5, save_steps=5)
    if not trainer.is_world_process_zero():
        trainer.add_callback(Signalled(number, step=2))
    stop = StopRequest(Console(quiet=True), folder)
    trainer.add_callback(stop)
    with pytest.raises(SystemExit), stop:
        trainer.train()
    assert trainer.state.global_step == 3
    del trainer
    leave_process_group()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_signal_to_one_process_ends_all_behind_the_same_step(tmp_path: Path) -> None:
    for process in start_group(2, stop_together, tmp_path, signal.SIGTERM, log=tmp_path / "log"):
        assert finish(process) == 0, [log.read_text()[-3000:] for log in tmp_path.glob("log.*")]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.bfloat16, 1e-6), (torch.float32, 0.05)])
def test_steps_are_those_of_torchs_muon(
    shape: tuple[int, int], precision: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("eagle31_hf.training.trainer.quick_dtype", lambda *_: precision)
    ours, theirs, vector = (nn.Parameter(torch.zeros(each)) for each in (shape, shape, 8))
    mine = MuonWithAdamW(nn.ParameterDict({"matrix": ours, "vector": vector}), lr=0.1)
    muon = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad, vector.grad = gradient.clone(), gradient.clone(), torch.ones(8)
        mine.step()
        muon.step()
    assert torch.allclose(ours, theirs, atol=3 * tolerance)
    assert precision == torch.bfloat16 or not torch.equal(ours, theirs)
    assert torch.allclose(vector, torch.full((8,), -0.3), atol=1e-5), "AdamW's steps"
