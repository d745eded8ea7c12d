"""Drafters packed by ourselves: what is packed, saved, read, drafted, refused and planned."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from packed_pairs import (
    DRAFTERS,
    LARGEST_ERROR,
    LOOPS,
    PACKINGS,
    SCHEMES_OF_DRAFTERS,
    drafter_folder,
    matrix_of,
    packed,
)
from torch import Tensor, nn

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.drafter.packed_linear import Int8Linear, PackedLinear
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.memory.drafter_facts import DrafterFacts
from eagle31_hf.memory.weights import SCHEMES, storage_bytes
from helpers import DEMO_DRAFTER, GROUPED, assert_same_text, left_padded, random_prompts, random_target, target_of

pytest.importorskip("bitsandbytes")


# --- packed drafters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("packing", PACKINGS)
@torch.no_grad()
def test_matrices_are_packed_and_nothing_else(drafters: Path, name: str, packing: str) -> None:
    drafter = packed(name, drafters, packing, target_of("llama"))
    scheme = drafter.packing
    assert scheme == SCHEMES_OF_DRAFTERS[packing]
    whole = Eagle31Drafter.from_pretrained(drafter_folder(name, drafters))
    worth = {n for n, shape in whole.packable().items() if scheme.packs(shape, 4, n)}
    modules = {n: module for n, module in drafter.named_modules() if isinstance(module, PackedLinear)}
    assert modules.keys() == worth
    for place, module in modules.items():
        linear = whole.get_submodule(place)
        exact, bias = linear.weight, 0 if linear.bias is None else linear.bias[:, None]
        assert (matrix_of(module) - bias - exact).abs().max() <= LARGEST_ERROR[packing] * exact.abs().max() + 1e-4
    assert "layers.0.mlp.gate_up_proj" in worth
    assert type(drafter.fc) is nn.Linear
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
    assert drafter.dtype == torch.float32
    assert not drafter.training


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("packing", ["int8", "nf4-dq"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planned_drafter_bytes_are_the_storages(drafters: Path, name: str, packing: str, dtype: str) -> None:
    target = random_target(hf.LlamaConfig(**GROUPED)).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    drafter = packed(name, drafters, packing, target)
    held = storage_bytes(drafter) + sum(
        rows.untyped_storage().nbytes() if isinstance(rows, Tensor) else storage_bytes(rows)
        for rows in [drafter.binding.draft_head]
        if rows is not None
    )
    precision = SCHEMES[f"bnb-{packing}"].__class__(**{**vars(SCHEMES[f"bnb-{packing}"]), "dtype": dtype})
    facts = DrafterFacts(drafter.config, precision.torch_dtype)
    assert facts.weight_bytes(precision) + facts.head_bytes(precision) == held


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["eagle 3.1", "shared rows", "latent"])
def test_packed_drafters_write_the_plain_text(drafters: Path, name: str, packing: str) -> None:
    target = target_of("llama")
    drafter = packed(name, drafters, packing, target)
    (prompt,) = random_prompts(1, seed=11)
    for loop in LOOPS.values():
        settings = {"num_assistant_tokens": 3, **loop}
        assert_same_text(
            target, drafter, left_padded([prompt]), oracle=0, settings=settings, max_new_tokens=12, do_sample=False
        )


def test_gathered_rows_are_packed_too(drafters: Path) -> None:
    target = target_of("llama")
    full = Eagle31Drafter.from_pretrained(drafter_folder("shared rows", drafters), target=target)
    small = packed("shared rows", drafters, "int8", target)
    skipped = packed("shared rows", drafters, "int8", target, llm_int8_skip_modules=["lm_head"])
    rows, exact = small.binding.draft_head, full.binding.draft_head
    assert isinstance(rows, Int8Linear)
    assert isinstance(exact, Tensor)
    assert (matrix_of(rows) - exact).abs().max() <= exact.abs().max() / 127
    assert torch.equal(skipped.binding.draft_head, exact)
    assert isinstance(skipped.layers[0].mlp.down_proj, Int8Linear)
    hidden = torch.randn(2, 3, 64)
    torch.testing.assert_close(small.draft_logits(hidden), rows(hidden))
    binding = small.binding
    small.detach()
    assert binding.draft_head is None


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "packed by bitsandbytes"),
        ({"load_in_4bit": False}, "load_in_8bit=True"),
        (17, "got quantization_config=17"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int3"}, "'int3'.*bnb_4bit_quant_type='nf4'"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": 3}, "packed by bitsandbytes"),
    ],
)
def test_settings_that_cannot_be_followed(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Eagle31Drafter.from_pretrained(DEMO_DRAFTER, quantization_config=config)


@pytest.mark.parametrize(("version", "message"), [(None, "'bitsandbytes>=0.50'"), ("0.49.1", "0.50 or later")])
def test_without_bitsandbytes_one_is_told_what_to_install(
    version: str | None, message: str, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = drafter_folder("eagle 3.1", drafters), random_target(hf.LlamaConfig(**GROUPED))

    def imported(name: str) -> Any:
        if version is None:
            raise ImportError(f"No module named {name!r}")
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ConfigurationError, match=message):
        Eagle31Drafter.from_pretrained(folder, quantization_config={"load_in_8bit": True}, target=target)
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_a_packed_drafter_is_not_saved(drafters: Path, tmp_path: Path) -> None:
    drafter = packed("eagle 3.1", drafters, "nf4", None)
    with pytest.raises(ConfigurationError, match=r"packed in bnb-nf4 to save; .*loaded without quantization_config"):
        drafter.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- planning ---------------------------------------------------------------------------------------------------------


def test_the_planner_packs_the_drafter_before_it_gives_it_up() -> None:
    config = hf.LlamaConfig(**GROUPED | {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000,
                                         "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 8192,
                                         "num_hidden_layers": 16})  # fmt: skip
    options: dict[str, Any] = {"context": 512, "margin": 0, "cache_type": "full", "prefill_chunk": 256}
    peaks = {
        precision: plan_memory(config, card="24GiB", drafter_precision=precision, **options).peak_bytes
        for precision in ("full", "int8", "nf4")
    }
    # What nf4 unpacks in captured steps stays in their pool; steps with int8 products are not captured.
    assert peaks["full"] > peaks["nf4"] > peaks["int8"]
    for peak in peaks.values():
        plan = plan_memory(config, card=peak + 2**20, **options)
        assert plan.fits
        assert plan.settings.speculates
        assert peaks[plan.settings.drafter_precision] <= peak
    smallest = plan_memory(config, card=peaks["int8"] + 2**20, **options)
    assert smallest.settings.drafter_precision == "int8"
