"""Drafters with latent attention (MLA): the published layout, and a DeepSeek-V3-shaped target.

Its formulas: tests/checkpoints/test_published_drafts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.checkpoints import Checkpoint, expected_shapes, read_checkpoint, write_checkpoint
from eagle31_hf.config import Eagle31Config
from eagle31_hf.errors import CheckpointFormatError, ConfigurationError
from eagle31_hf.memory.drafter_facts import drafter_facts
from eagle31_hf.memory.quantization_schemes import SCHEMES
from helpers import SIZES, assert_same_text, configured, left_padded, random_drafter, random_prompts, random_target

# As published for Kimi K2.6 (lightseek), every size cut down; names and fields are theirs.
KIMI: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "draft_vocab_size": 96,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 1024,
    "fc_norm": True,
    "norm_output": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True,
                     "use_last_layernorm": True},
}  # fmt: skip
ATTENTION = {
    "q_a_proj": (12, 64), "q_a_layernorm": (12,), "q_b_proj": (40, 12), "kv_a_proj_with_mqa": (14, 64),
    "kv_a_layernorm": (10,), "kv_b_proj": (44, 10), "o_proj": (32, 20),
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = hf.DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4, "head_dim": 4}, **LATENT, moe_intermediate_size=32, n_routed_experts=4,
    n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip


def kimi_tensors(prefix: str = "midlayer", without: tuple[str, ...] = (), **more: tuple[int, ...]) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (96, 32)}
    shapes |= {f"fc_norm.{slot}.weight": (32,) for slot in range(3)}
    layer = {f"self_attn.{name}": shape for name, shape in {**ATTENTION, **more}.items()}
    layer |= dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (32,))
    layer |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    shapes |= {f"{prefix}.{name}.weight": shape for name, shape in layer.items()}
    dice = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=dice) * (0.2 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
        if not any(part in name for part in without)
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- the published layout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_read_written_and_read_again_it_is_the_same(tmp_path, prefix):
    once = read_checkpoint(save(tmp_path / "a", KIMI, kimi_tensors(prefix)))
    assert (once.format, once.config.aux_layers, once.config.head_dim) == ("mla", [2, 30, 58], 4)
    assert once.config.is_latent
    assert once.config.is_eagle31
    assert {name: tuple(tensor.shape) for name, tensor in once.tensors.items()} == expected_shapes(once.config)
    write_checkpoint(once, tmp_path / "b", format="mla")
    twice = read_checkpoint(tmp_path / "b")
    assert twice.config.to_dict() == once.config.to_dict()
    assert twice.tensors.keys() == once.tensors.keys()
    assert all(torch.equal(twice.tensors[name], tensor) for name, tensor in once.tensors.items())
    stored = json.loads((tmp_path / "b" / "config.json").read_text())
    assert stored["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert stored["model_type"] == "deepseek_v3"
    assert "midlayer.self_attn.kv_a_proj_with_mqa.weight" in load_file(tmp_path / "b" / "model.safetensors")


@pytest.mark.parametrize("format", ["plain", "speculators"])
def test_other_layouts_have_no_words_for_it_nor_this_one_for_theirs(tmp_path, format):
    latent = read_checkpoint(save(tmp_path, KIMI, kimi_tensors()))
    with pytest.raises(ConfigurationError, match=r"latent attention.*write it as mla"):
        write_checkpoint(latent, tmp_path / "no", format=format)
    grouped = Eagle31Config(hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8, own_embedding=True)
    tensors = {name: torch.ones(shape) for name, shape in expected_shapes(grouped).items()}
    with pytest.raises(ConfigurationError, match="the mla format cannot express attention with keys and values"):
        write_checkpoint(Checkpoint(grouped, tensors), tmp_path / "no", format="mla")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"kv_lora_rank": None}, {}, r"lacks \['kv_lora_rank'\]"),
        ({"v_head_dim": 0}, {}, "no possible drafter.*v_head_dim"),
        ({"kv_lora_rank": 11}, {}, r"kv_b_proj\.weight is \[44, 10\], wanted \[44, 11\]"),
        ({"q_lora_rank": None}, {}, r"missing: layers\.0\.self_attn\.q_proj\.weight"),
        ({"attention_bias": True}, {}, "attention_bias"),
        ({}, {"without": ("kv_a_layernorm",)}, r"missing: layers\.0\.self_attn\.kv_a_layernorm"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named(tmp_path, config, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, KIMI | config, kimi_tensors(**tensors)))


# --- at work ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Eagle31Drafter]:
    target = random_target(DEEPSEEK)
    return target, random_drafter(target, aux_layers=[1, 2, 4], **LATENT)


WAYS: dict[str, dict[str, Any]] = {
    "chain": {}, "fixed chain": {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    "tree": {"draft_top_k": 3, "draft_tree_size": 12},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_the_targets(pair, way):
    target, drafter = pair
    with configured(drafter, **WAYS[way]):
        assert_same_text(target, drafter, left_padded(random_prompts(3)), max_new_tokens=24, do_sample=False)


def test_saved_it_serves_again_and_without_query_latent_too(pair, tmp_path):
    target, _ = pair
    for fields in (LATENT, LATENT | {"q_lora_rank": None}):
        drafter = random_drafter(target, aux_layers=[2, 3, 4], **fields)
        drafter.save_pretrained(tmp_path / "saved")
        again = Eagle31Drafter.from_pretrained(tmp_path / "saved", target=target)
        tensors = drafter.canonical_tensors()
        assert all(torch.equal(again.canonical_tensors()[name], tensor) for name, tensor in tensors.items())


def test_a_plan_counts_what_is_loaded(pair):
    target, drafter = pair
    facts = drafter_facts(drafter.config, 4)
    counted = facts.weight_bytes(SCHEMES["fp32"]) + facts.head_bytes(SCHEMES["fp32"]) - facts.fixed_bytes
    assert counted == sum(parameter.nbytes for parameter in drafter.parameters())
    assert plan_memory(target.config, card="RTX 4090", drafter=drafter, context=64)
