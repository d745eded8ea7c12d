"""Targets by folder or id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import families
from eagle31_hf.cli import app
from eagle31_hf.drafter.loading import load_target
from eagle31_hf.errors import IncompatibleTargetError, removal
from eagle31_hf.memory import plan_memory
from eagle31_hf.training.preparation import load_target as load_frozen
from eagle31_hf.training.settings import TrainingSettings
from helpers import demo_tokenizer, random_drafter, seeded


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
        ids = torch.arange(5, 15)[None]
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        plain = model.generate(ids, **settings)
        drafter = random_drafter(model)
        assert model.generate(ids, assistant_model=drafter, **settings).tolist() == plain.tolist()
        assert drafter.stats.loop == "own"
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--card", "24GiB", "--context", "128"])
    assert result.exit_code == 0, result.output
