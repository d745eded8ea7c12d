"""Targets by folder, id or GGUF file. The GGUF file is a tiny one, made here."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoTokenizer
from typer.testing import CliRunner

import families
from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli import app
from eagle31_hf.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleTargetError,
)
from eagle31_hf.memory import plan_memory
from eagle31_hf.target.loading import load_target
from eagle31_hf.training.preparation import load_target as load_frozen
from eagle31_hf.training.settings import TrainingSettings
from gguf_file import CHAT_TEMPLATE, write_gguf
from helpers import demo_tokenizer, random_drafter, seeded

NUMBERS = "In 2024 there were 12345 cats."


@pytest.fixture(scope="module")
def gguf_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def drafter_folder(gguf_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, _ = load_target(str(gguf_target), dtype="float32", device_map="cpu")
    folder = tmp_path_factory.mktemp("drafter")
    random_drafter(target).save_pretrained(folder)
    return folder


def test_a_gguf_target_writes_the_same_with_a_drafter(gguf_target: Path, drafter_folder: Path) -> None:
    target, tokenizer = load_target(str(gguf_target), dtype="float32", device_map="cpu")
    drafter = Eagle31Drafter.from_pretrained(drafter_folder, target=target)
    prompt = tokenizer(NUMBERS, return_tensors="pt")
    plain = target.generate(**prompt, max_new_tokens=24, do_sample=False)  # type: ignore[operator]
    drafted = target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)  # type: ignore[operator]
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.rounds > 0


def test_commands_take_the_file_as_they_take_a_folder(gguf_target: Path, drafter_folder: Path) -> None:
    pair = ["--target", str(gguf_target), "--drafter", str(drafter_folder), "--memory", "auto", "--context", "128"]
    settings = ["generate", "--prompt", NUMBERS, "--max-new-tokens", "4", "--no-compare"]
    result = CliRunner().invoke(app, [*settings, *pair])
    assert result.exit_code == 0, result.output
    assert "GGUF weights are unpacked to bf16" in " ".join(result.output.split())


def test_training_loads_it_frozen(gguf_target: Path, tmp_path: Path) -> None:
    told = TrainingSettings(str(gguf_target), ("self:1",), tmp_path, device="cpu", dtype="stored")
    target, tokenizer = load_frozen(told)
    assert target.dtype is torch.bfloat16
    assert not [name for name, weight in target.named_parameters() if weight.requires_grad]
    assert tokenizer.tokenize("2024") == list("2024")


def test_its_tokenizer_splits_digits_as_the_file_says(gguf_target: Path) -> None:
    _, tokenizer = load_target(str(gguf_target), device_map="cpu")
    as_read = AutoTokenizer.from_pretrained(gguf_target.parent, gguf_file=gguf_target.name)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    tokens = tokenizer.tokenize(NUMBERS)
    assert [token for token in tokens if any(sign.isdigit() for sign in token)] == list("202412345")
    assert tokenizer.decode(tokenizer(NUMBERS)["input_ids"]) == NUMBERS
    assert as_read.tokenize(NUMBERS) != tokens, "transformers has learned it: the mending may go"


@pytest.mark.parametrize(("splitting", "told"), [("gpt-2", False), ("qwen2", False), ("no-such-splitting", True)])
def test_an_unknown_splitting_is_told(tmp_path: Path, caplog: Any, splitting: str, told: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", splitting=splitting)
    with caplog.at_level(logging.WARNING, "eagle31_hf.target.loading"):
        load_target(str(path), device_map="cpu")
    assert any(repr(splitting) in line for line in caplog.messages) == told


def test_a_plan_counts_what_is_unpacked_and_is_known_again(gguf_target: Path) -> None:
    plan = plan_memory(str(gguf_target), quantization="fp32", card="RTX 3060", context=128)
    target, _ = load_target(str(gguf_target), dtype="float32", device_map="cpu")
    tensors = (*target.parameters(), *target.buffers())
    assert plan.target.weights.total == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    plan.check_target(target)


@pytest.mark.parametrize(("settings", "loaded"), [("stored", torch.bfloat16), ("fp16", torch.float16)])
def test_what_it_is_unpacked_to(gguf_target: Path, settings: str, loaded: torch.dtype) -> None:
    assert load_target(str(gguf_target), dtype=settings, device_map="cpu")[0].dtype is loaded


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"without": "blk.1.ffn_up.weight"}, r"no tensors for 1 weights.*layers\.1\.mlp\.up_proj"),
        ({"architecture": "no-such"}, "no-such"),
    ],
)
def test_a_file_that_transformers_cannot_read(tmp_path: Path, made: dict[str, str], message: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **made)
    with pytest.raises(IncompatibleTargetError, match=message):
        load_target(str(path), device_map="cpu")


def test_a_file_that_is_no_gguf_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no GGUF file"):
        load_target(str(tmp_path / "none.gguf"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointFormatError, match=r"cut\.gguf.*ends in the middle"):
        load_target(str(tmp_path / "cut.gguf"))


def test_the_package_that_reads_it_is_named(gguf_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ConfigurationError, match="pip install gguf"):
        load_target(str(gguf_target))


def glm_4v() -> Any:
    text = {**families.GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    tower = {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 48,
             "image_size": 16, "patch_size": 8}  # fmt: skip
    return hf.Glm4vForConditionalGeneration(hf.Glm4vConfig(text_config=text, vision_config=tower))


@pytest.mark.parametrize("make", [families.qwen_2_5_vl, families.qwen_3_vl, families.mistral_3, glm_4v])
def test_targets_that_see_are_loaded_and_planned_for(make: Any, tmp_path: Path) -> None:
    """`AutoModelForCausalLM` maps none of them."""
    with seeded(0):
        make().float().save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    trained = TrainingSettings(str(tmp_path), ("self:1",), tmp_path, device="cpu", dtype="stored")
    for model, _ in (load_target(str(tmp_path)), load_frozen(trained)):
        ids = torch.arange(5, 15)[None]
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        plain = model.generate(ids, **settings)
        drafter = random_drafter(model)
        assert model.generate(ids, assistant_model=drafter, **settings).tolist() == plain.tolist()
        assert drafter.stats.loop == "own"
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--card", "24GiB", "--context", "128"])
    assert result.exit_code == 0, result.output
