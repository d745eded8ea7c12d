"""Targets by folder or id, and which precision is quick: by what processors announce, not by what this one is."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import families
from eagle31_hf.cli import app
from eagle31_hf.cli.pairs import PairSource, load_pair
from eagle31_hf.drafter import loading
from eagle31_hf.drafter.loading import load_target
from eagle31_hf.errors import IncompatibleTargetError, removal
from eagle31_hf.memory import plan_memory
from eagle31_hf.targets import devices
from eagle31_hf.targets.devices import precision_caution, quick_dtype, warn_once
from eagle31_hf.training.preparation import load_target as load_frozen
from eagle31_hf.training.settings import TrainingSettings
from helpers import DEMO_DRAFTER, MODELS, assert_same_text, demo_tokenizer, random_drafter, seeded


def test_a_gguf_file_is_answered_with_what_to_do_instead(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    line = removal("target FILE.gguf")
    trained = TrainingSettings(str(file), ("self:1",), tmp_path, device="cpu")
    for ask in (lambda: load_target(str(file)), lambda: load_frozen(trained), lambda: plan_memory(str(file))):
        with pytest.raises(IncompatibleTargetError) as refused:
            ask()
        assert str(refused.value) == line
    for command in (["plan", str(file)], ["generate", "--prompt", "Hello", "--target", str(file), "--drafter", "none"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert line.split(";")[0] in " ".join(result.output.replace("\u2502", " ").split())


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
        assert_same_text(model, random_drafter(model), torch.arange(5, 15)[None])
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--card", "24GiB", "--context", "128"])
    assert result.exit_code == 0, result.output


# --- precision --------------------------------------------------------------------------------------------------------

PROCESSORS = {  # what they announce; what bfloat16 and float16 are computed in
    "Zen 3": ("flags\t\t: fpu fma avx avx2 sha_ni", torch.float32, torch.float32),
    "Cooper Lake": ("flags\t\t: avx2 avx512f avx512_bf16", torch.bfloat16, torch.float32),
    "Sapphire Rapids": ("flags\t\t: avx512_bf16 avx512_fp16 amx_bf16", torch.bfloat16, torch.float16),
    "Graviton 3": ("Features\t: fp asimd asimdhp svebf16 bf16", torch.bfloat16, torch.float16),
    "Cortex-A72": ("Features\t: fp asimd evtstrm crc32", torch.float32, torch.float32),
}


@pytest.fixture(params=PROCESSORS)
def processor(request, tmp_path: Path, monkeypatch) -> tuple[torch.dtype, torch.dtype]:
    text, *answers = PROCESSORS[request.param]
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\n{text}\n", encoding="ascii")
    monkeypatch.setattr(devices, "PROCESSOR_FACTS", facts)
    return tuple(answers)


def test_a_processor_computes_in_what_it_announces(processor) -> None:
    dtype, half = processor
    assert quick_dtype(torch.bfloat16, "cpu") is dtype
    assert quick_dtype(torch.float16, "cpu") is half
    assert quick_dtype(torch.float32, "cpu") is torch.float32


def test_where_the_system_does_not_say_weights_stay_as_they_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(devices, "PROCESSOR_FACTS", tmp_path / "nothing")
    assert quick_dtype(torch.bfloat16, "cpu") is torch.bfloat16


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 9), torch.bfloat16)])
def test_a_gpu_before_ampere_computes_in_float16(monkeypatch, capability, dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert quick_dtype(torch.bfloat16, "cuda") is dtype


def test_the_owner_of_a_slow_model_is_told_once(processor, caplog) -> None:
    dtype, _ = processor
    warn_once.cache_clear()
    model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_once(precision_caution(model))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (dtype is torch.float32)
    assert all("Load it with dtype=torch.float32 (twice the memory)" in line for line in said)
    model.hf_quantizer = object()
    assert not precision_caution(model), "packed weights are computed in what their format says"


@pytest.mark.parametrize(
    ("settings", "loaded"), [("auto", torch.float32), ("stored", torch.bfloat16), ("bfloat16", torch.bfloat16)]
)
def test_commands_load_what_is_quick_unless_told_otherwise(monkeypatch, settings, loaded) -> None:
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: torch.float32)
    pair = load_pair(PairSource([str(MODELS / "demo-target"), str(DEMO_DRAFTER)], dtype=settings, device="cpu"))
    assert pair.target.dtype is loaded
    assert pair.drafter.dtype is loaded
