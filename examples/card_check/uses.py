"""The repository's tests, the server's engine, and training, on the device."""

from __future__ import annotations

import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.serving.engine import Engine, EngineSettings
from eagle31_hf.serving.requests import Sampling, TextRequest
from eagle31_hf.training.data.packing import collate
from eagle31_hf.training.distillation.training_model import DistillationModel
from eagle31_hf.training.settings import DistillationSettings

from .embedded import EmbeddedPair
from .machine import Machine, to_ms
from .notes import Notes

REPOSITORY = Path(__file__).resolve().parents[2]


# --- tests ------------------------------------------------------------------------------------------------------------


class Outcomes:
    """A plugin of pytest that remembers what became of the tests."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.failed:
            self.failed.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:200]}")


def check_tests(machine: Machine, notes: Notes) -> None:
    """The tests marked gpu, but for those that make targets of 8B and 70B; on a CPU one of them."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        notes.put("tests", f"left out: {' and '.join(missing)} are not here")
        return
    import pytest

    os.chdir(REPOSITORY)
    which = ["-m", "gpu", "--deselect", "tests/test_gpu.py::test_runs_take_what_was_planned"]
    which = which if machine.is_cuda else ["-k", "static_cache and not cuda"]
    outcomes = Outcomes()
    status = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *which, "tests/test_gpu.py"], [outcomes])
    notes.put("outcomes", outcomes.counts)
    if status != pytest.ExitCode.OK:
        notes.fail("tests", {"status": int(status), "failed": outcomes.failed[:20]})


# --- serving ----------------------------------------------------------------------------------------------------------


def check_serve(machine: Machine, notes: Notes) -> None:
    """Tokens per second of the server's engine, without HTTP: one client, and many."""
    pair, new = EmbeddedPair(machine, torch.bfloat16), machine.size(96, 4)
    prompts = [tuple(pair.prompts(1, first)["input_ids"][0].tolist()) for first in range(4)]
    for clients in machine.size((1, 8, 32), (2,)):
        engine = Engine(pair.drafter, pair.tokenizer, EngineSettings(max_rows=clients, context=512))
        try:
            if machine.is_cuda:
                answered(engine, prompts, clients, new)  # libraries set themselves up
            notes.attempt(f"{clients} clients, tok/s", lambda e=engine, c=clients: answered(e, prompts, 2 * c, new))
        finally:
            engine.close(2)
        machine.free()


def answered(engine: Engine, prompts: list[tuple[int, ...]], count: int, new: int) -> float:
    """Tokens per second of so many requests, sent at once."""
    all_ended, ended, errors = threading.Event(), [], []

    def hear(event: Any) -> None:
        if event.finish is None:
            return
        if event.finish == "error":
            errors.append(str(event.error))
        ended.append(event.finish)
        if len(ended) == count:
            all_ended.set()

    started = time.perf_counter()
    for index in range(count):
        greedy = Sampling(temperature=0)
        engine.submit(TextRequest(prompts[index % len(prompts)], new, greedy, ignore_eos=True), hear)
    if not all_ended.wait(60) or errors:
        raise RuntimeError(f"{len(ended)} of {count} requests ended within 60 s; errors: {errors[:2]}")
    return round(count * new / (time.perf_counter() - started), 1)


# --- training ---------------------------------------------------------------------------------------------------------


def check_train(machine: Machine, notes: Notes) -> None:
    """Tokens per second of writing and of distilling, by a target of SmolLM2-135M's shape with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    }  # fmt: skip
    if machine.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 512}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(machine.device).eval()
    target.requires_grad_(False)
    for rows in machine.size((64, 256, 1024), (2,)):
        notes.attempt(f"writing x{rows}", lambda rows=rows: written(machine, target, rows))
    distilling = Distilling(machine, target)
    for rows in machine.size((2, 16, 64), (2,)):
        notes.attempt(f"distilling x{rows}", lambda rows=rows: distilling.measure(rows))


def written(machine: Machine, target: Any, rows: int) -> dict[str, Any]:
    ids = torch.randint(3, target.config.vocab_size, (rows, 48), device=machine.device)

    def write(new: int) -> None:
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "pad_token_id": 0}
        target.generate(ids, attention_mask=torch.ones_like(ids), **how)

    write(2)
    new = machine.size(96, 4)
    return {"tok/s": round(rows * new / machine.seconds(lambda: write(new))), "gib": machine.peak_gib()}


class Distilling:
    """Stage 1 of training a drafter, without the data that it would learn from."""

    def __init__(self, machine: Machine, target: Any):
        self.machine, self.vocabulary = machine, target.config.vocab_size
        self.length = machine.size(512, 32)
        drafter = Eagle31Drafter.from_target(target, draft_vocab_size=machine.size(8192, 128)).float().train()
        drafter.requires_grad_(True)
        if drafter.embed_tokens is not None:
            drafter.embed_tokens.requires_grad_(False)
        self.model = DistillationModel(drafter, DistillationSettings(steps=3))
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=machine.is_cuda)

    def measure(self, rows: int) -> dict[str, Any]:
        """Of `rows` rows a step."""
        made = [self._row() for _ in range(rows)]
        batch = {name: tensor.to(self.machine.device) for name, tensor in collate(made).items()}
        for _ in range(self.machine.size(3, 1)):
            loss = self._step(batch)
        count = self.machine.size(12, 1)
        seconds = self.machine.seconds(lambda: [self._step(batch) for _ in range(count)]) / count
        tokens = rows * self.length
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {float(loss)}")
        per_token = round(float(loss) / tokens, 3)
        rates = {"tok/s": round(tokens / seconds), "step_ms": to_ms(seconds)}
        return rates | {"gib": self.machine.peak_gib(), "loss": per_token}

    def _row(self) -> dict[str, torch.Tensor]:
        length = self.length
        return {
            "input_ids": torch.randint(3, self.vocabulary, (length,)),
            "loss_mask": torch.ones(length, dtype=torch.bool),
            "document_ids": torch.zeros(length, dtype=torch.long),
            "position_ids": torch.arange(length),
            "written_at": torch.zeros(length),
        }

    def _step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.machine.device, torch.bfloat16):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
