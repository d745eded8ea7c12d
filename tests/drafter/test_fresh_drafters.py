"""A fresh drafter for any family: sizes under every name, and in what precision it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.demo import target_path
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError, MemoryPlanError
from eagle31_hf.memory.dry_run import Forward
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.targets.fresh_drafter import default_config, trained_context
from eagle31_hf.training.settings import TrainingSettings
from families import GEMMA_4, TEXT_FAMILIES
from helpers import DEMO_DRAFTER, GROUPED, assert_same_text, left_padded, random_prompts, random_target

PLAIN = ("bloom", "gpt_neo")  # masked by code of their own
WIDTHS = {"gpt2": 256, "gptj": 256, "opt": 80, "falcon": 256, "bloom": 256, "gpt_neo": 256}


# Layers that attend to another layer's keys and values keep none: Gemma 4 E2B and E4B.
SHARED = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8, "num_hidden_layers": 12,
          "layer_types": ["sliding_attention", "full_attention"] * 6}  # fmt: skip
ALL_FAMILIES = TEXT_FAMILIES | {"gemma4_text, shared layers": lambda: hf.Gemma4TextConfig(**GEMMA_4 | SHARED)}


@pytest.mark.parametrize("family", ALL_FAMILIES)
@torch.no_grad()
def test_sizes_of_any_family_are_known_and_its_cache_is_planned_layer_by_layer(family):
    """What Gemma 4's wide and narrow layers take is what a cache of it holds. Texts: tests/contract."""
    target = random_target(ALL_FAMILIES[family]())
    assert default_config(target.config).intermediate_size == WIDTHS.get(family, 96)
    if family in PLAIN:
        with pytest.raises(MemoryPlanError, match="leave the plan out"):
            plan_memory(target.config, card="RTX 4090", context=64)
        return
    assert plan_memory(target.config, card="RTX 4090", context=64).target.num_parameters > 0
    planned = read_target(target.config).forward.count(Forward(4, 40, block=4)).cache
    cache = SpeculativeCache.from_config(target.config, batch_size=1, capacity=40, block=4)
    cache.place(4)
    mask = cache.attention_mask(dtype=torch.float32)
    ids, positions = torch.tensor([[3, 4, 5, 6]]), cache.position_ids()
    target(ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
    assert planned == sum(layer.num_bytes for layer in cache.layers)


def of_depth(layers: int):
    return random_target(hf.LlamaConfig(**GROUPED | {"num_hidden_layers": layers}))


@pytest.mark.parametrize("layers", [3, 4, 5, 6, 7, 8, 12, 32])
def test_a_fresh_drafter_reads_three_different_states(layers, tmp_path):
    target = of_depth(layers)
    drafter = Eagle31Drafter.from_target(target)
    taps = drafter.binding.aux_layers
    assert len(set(taps)) == 3
    assert sorted(taps) == list(taps)
    assert taps[0] >= 1
    assert taps[-1] <= layers
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3), "the published default"
        assert drafter.config.aux_layers is None
    drafter.save_pretrained(tmp_path)
    assert Eagle31Drafter.from_pretrained(tmp_path, target=target).binding.aux_layers == taps
    again = Eagle31Drafter.from_target(target, config=default_config(target.config))
    assert again.binding.aux_layers == taps
    assert Eagle31Drafter.from_target(target, num_aux_hidden_states=3).binding.aux_layers == taps
    assert Eagle31Drafter.from_target(target, aux_layers=[1, 1, 2]).binding.aux_layers == (1, 1, 2)


@pytest.mark.parametrize("layers", [4, 5, 6])
def test_what_was_trained_with_the_published_default_is_read_with_it(layers):
    target = of_depth(layers)
    drafter = Eagle31Drafter(default_config(target.config, aux_layers=None)).attach(target)
    assert drafter.binding.aux_layers == (2, layers // 2, layers - 3)


@pytest.mark.parametrize(("layers", "states"), [(1, [0, 1]), (2, [0, 1, 2])])
@torch.no_grad()
def test_targets_too_shallow_for_three_states_are_told_what_to_do(layers, states):
    target = of_depth(layers)
    advice = rf"a target of {layers} layers has hidden states 0\.\.{layers}; .*set aux_layers"
    with pytest.raises(ConfigurationError, match=advice):
        Eagle31Drafter.from_target(target)
    drafter = Eagle31Drafter.from_target(target, aux_layers=states, num_aux_hidden_states=len(states))
    assert_same_text(target, drafter, left_padded(random_prompts(1)), max_new_tokens=12, do_sample=False)


def test_layers_of_unlike_width_are_told_apart():
    other = hf.Gemma4TextConfig(**GEMMA_4 | {"global_head_dim": 64})
    assert read_target(other).fingerprint != read_target(TEXT_FAMILIES["gemma4_text"]()).fingerprint


def test_context_lengths_under_other_names():
    assert trained_context(TEXT_FAMILIES["gpt2"]()) == 128
    assert trained_context(hf.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=96, max_seq_len=99)) == 99
    assert trained_context(hf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=96)) is None


def test_an_epsilon_that_is_null_is_not_taken():
    """Cohere 2 MoE has one, for it has other norms."""
    target = random_target(hf.LlamaConfig(**GROUPED))
    vars(target.config)["rms_norm_eps"] = None
    assert default_config(target.config).rms_norm_eps == 1e-5


def test_training_is_set_up_for_a_target_of_unlike_layers():
    from eagle31_hf.training.preparation import resolve

    settings = TrainingSettings(target="x", prompts=("x.jsonl",), out=Path("x"))
    for family in ("gemma4_text", "gpt2", "bloom"):
        assert resolve(settings, random_target(TEXT_FAMILIES[family]())).max_length in (128, 512)


def test_a_config_without_sizes_is_refused_and_overrides_are_the_callers(monkeypatch):
    target = random_target(TEXT_FAMILIES["gpt2"]())
    with pytest.raises(ConfigurationError, match="hidden_act is 'none'"):
        Eagle31Drafter.from_target(target, hidden_act="none")
    monkeypatch.setattr(type(target.config), "attribute_map", {})
    with pytest.raises(IncompatibleTargetError, match=r"does not tell the sizes of its layers.*pass config="):
        Eagle31Drafter.from_target(target)


# --- how it is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat61", "int8"])
def test_a_dtype_that_cannot_be_had_costs_no_download(dtype):
    with pytest.raises(ConfigurationError, match="wanted 'auto', 'bfloat16'"):
        Eagle31Drafter.from_pretrained("no/such-drafter-is-asked-for", dtype=dtype)


def test_dtype_auto_is_the_checkpoints_own():
    target = hf.AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    stored = json.loads((DEMO_DRAFTER / "config.json").read_text())["torch_dtype"]
    assert str(Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target, dtype="auto").dtype) == f"torch.{stored}"
    assert Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target).dtype == torch.float32
    assert Eagle31Drafter.from_pretrained(DEMO_DRAFTER, dtype="torch.float16").dtype == torch.float16


def test_a_compiled_target_is_refused_with_the_way_round():
    target = random_target(TEXT_FAMILIES["gpt2"]())
    drafter = Eagle31Drafter.from_target(target)
    with pytest.raises(IncompatibleTargetError, match=r"model\._orig_mod.*eagle31 warmup"):
        drafter.attach(torch.compile(target))
    assert drafter.attach(torch.compile(target)._orig_mod).binding.model is target
