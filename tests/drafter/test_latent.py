"""Drafters with latent attention (MLA) beside a DeepSeek-V3-shaped target. Files and formulas: tests/checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.memory.drafter_facts import DrafterFacts
from eagle31_hf.memory.weights import SCHEMES
from helpers import SIZES, assert_same_text, left_padded, random_drafter, random_prompts, random_target

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = hf.DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4, "head_dim": 4}, **LATENT, moe_intermediate_size=32, n_routed_experts=4,
    n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip


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
    inputs = left_padded(random_prompts(3))
    assert_same_text(*pair, inputs, settings=WAYS[way], max_new_tokens=24, do_sample=False)


def test_a_plan_counts_what_is_loaded(pair):
    target, drafter = pair
    facts = DrafterFacts(drafter.config, SCHEMES["fp32"].torch_dtype)
    counted = facts.weight_bytes(SCHEMES["fp32"]) + facts.head_bytes(SCHEMES["fp32"]) - facts.fixed_bytes
    assert counted == sum(parameter.nbytes for parameter in drafter.parameters())
    assert plan_memory(target.config, card="RTX 4090", drafter=drafter, context=64)
