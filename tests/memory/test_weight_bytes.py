"""Bytes of weights: closed forms against real storages, against shapes, and against published totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from eagle31_hf.errors import MemoryPlanError
from eagle31_hf.memory import plan_memory
from eagle31_hf.memory.known_targets import known_targets
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.memory.weights import SCHEMES, scheme, storage_bytes
from helpers import PACKINGS

pytestmark = pytest.mark.contract


TARGETS = known_targets()
# By their safetensors index, of Qwen3.5 and 3.6 by GGUF files of the decoder alone.
PUBLISHED_PARAMETERS = {
    "Llama 3.1 8B": 8_030_261_248, "Llama 3.1 70B": 70_553_706_496, "Qwen2.5 7B": 7_615_616_512,
    "Qwen2.5 14B": 14_770_033_664, "Qwen2.5 32B": 32_763_876_352, "Qwen2.5 72B": 72_706_203_648,
    "Qwen3 8B": 8_190_735_360, "Qwen3 32B": 32_762_123_264, "Mistral 7B v0.3": 7_248_023_552,
    "Mixtral 8x7B": 46_702_792_704, "gpt-oss 20B": 20_914_757_184, "Gemma 3 27B": 27_009_346_304,
    "Qwen3.5 9B": 8_953_803_264, "Qwen3.6 27B": 26_895_998_464, "Qwen3.6 35B-A3B": 34_660_610_688,
    "Nemotron 3 Nano 30B-A3B": 31_577_937_344,
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_counted_parameters_equal_published_totals(name: str) -> None:
    assert read_target(TARGETS[name], "bf16").num_parameters == PUBLISHED_PARAMETERS[name]


# --- real storages ----------------------------------------------------------------------------------------------------

TINY = {"num_hidden_layers": 2, "vocab_size": 500, "max_position_embeddings": 256}
TINY_TARGETS: dict[str, PreTrainedConfig] = {
    "grouped heads": LlamaConfig(hidden_size=128, intermediate_size=320, num_attention_heads=8, num_key_value_heads=2,
                                 **TINY),
    "tied head": LlamaConfig(hidden_size=128, intermediate_size=192, num_attention_heads=4, tie_word_embeddings=True,
                             **TINY),
    "odd sizes, biases": Qwen2Config(hidden_size=96, intermediate_size=200, num_attention_heads=6,
                                     num_key_value_heads=3, **TINY),
    "experts": MixtralConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
                             num_local_experts=4, **TINY),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, config in TINY_TARGETS.items():
        folders[name] = tmp_path_factory.mktemp("target")
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folders[name])
    return folders


def load(folder: Path, quantization_config: object = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization_config, dtype=dtype)


@pytest.mark.parametrize("name", TINY_TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_plain_weights_equal_their_storages(saved: dict[str, Path], name: str, dtype: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    counted = read_target(TINY_TARGETS[name], dtype).weights
    assert counted.total == storage_bytes(load(saved[name], dtype=torch_dtype))


BITSANDBYTES = {f"bnb-{name}": fields for name, fields in PACKINGS.items()} | {
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-fp4-dq": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
}


@pytest.mark.parametrize("name", TINY_TARGETS)
@pytest.mark.parametrize("scheme_name", BITSANDBYTES)
def test_bitsandbytes_weights_equal_their_storages(saved: dict[str, Path], name: str, scheme_name: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = load(saved[name], BitsAndBytesConfig(**BITSANDBYTES[scheme_name]))
    counted = read_target(TINY_TARGETS[name], scheme_name).weights
    assert counted.total == storage_bytes(model)
    assert (counted.experts > 0) == (name == "experts")
    # The same from the configuration the loaded model carries.
    assert scheme(model.config.quantization_config) == scheme(SCHEMES[scheme_name])


def test_a_class_that_fails_without_a_word_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_how: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", refuse)
    with pytest.raises(MemoryPlanError, match=r"no causal language model of this LlamaConfig .*: RuntimeError; give"):
        read_target(LlamaConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=1, vocab_size=77))


def test_named_skips_replace_the_default_ones(saved: dict[str, Path]) -> None:
    """Naming modules to skip makes bitsandbytes pack the LM head: easily overlooked, so counted."""
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["mlp.up_proj"])
    model = load(saved["grouped heads"], config)
    packing = scheme(config.to_dict())
    counted = read_target(TINY_TARGETS["grouped heads"], packing).weights
    assert packing.skip_modules == ("mlp.up_proj",)
    assert counted.total == storage_bytes(model)


def test_weights_packed_in_another_way_are_planned_as_stored(tmp_path: Path) -> None:
    """torchao, HQQ and whatever is to come: by their files, or as loaded."""
    config = LlamaConfig(**{**TINY_TARGETS["grouped heads"].to_dict(), "quantization_config": {"quant_method": "hqq"}})
    config.save_pretrained(tmp_path)
    with pytest.raises(MemoryPlanError, match="give a folder or Hub id that holds them, or the loaded model"):
        read_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(123_456))
    facts = read_target(tmp_path)
    assert (facts.quantization.name, facts.weights.total) == ("as stored", 123_456)
    assert plan_memory(tmp_path, card="RTX 3060", context=64).fits
