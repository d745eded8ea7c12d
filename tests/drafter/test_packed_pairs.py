"""Packed targets as transformers loads them, and drafters packed by ourselves: every loop writes their plain text.

What is packed, saved, read, planned, refused or warned about.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from packed_pairs import (
    DRAFTERS,
    FAMILIES,
    LARGEST_ERROR,
    LOOPS,
    SCHEMES_OF_DRAFTERS,
    assert_every_loop_agrees,
    drafter_folder,
    load,
    matrix_of,
    packed,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.drafter.packed_linear import Int8Linear, PackedLinear
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError
from eagle31_hf.memory.drafter_facts import DrafterFacts
from eagle31_hf.memory.weights import SCHEMES, storage_bytes
from helpers import (
    DEMO_DRAFTER,
    GROUPED,
    PACKINGS,
    assert_same_or_tie,
    assert_same_text,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    target_of,
    write,
)
from matrix import matrix

pytest.importorskip("bitsandbytes")


HEADS = {"plain head": {}, "packed head": {"llm_int8_skip_modules": []}}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "packing", "head"), matrix([*FAMILIES], [*PACKINGS], [*HEADS]))
@pytest.mark.thorough(every=2)
def test_packed_targets_write_their_plain_text(saved: dict[str, Path], family: str, packing: str, head: str) -> None:
    target = load(saved[family], packing, **HEADS[head])
    packed_head = target.get_output_embeddings()
    assert (type(packed_head) is nn.Linear) == (head == "plain head")
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False, draft_vocab_size=40)
    assert_every_loop_agrees(target, drafter, seed=7)


@pytest.mark.contract
@pytest.mark.parametrize(("packing", "of_drafter"), [("nf4", None), ("int8", None), ("nf4", "nf4-dq")])
def test_a_packed_target_in_bf16_writes_its_plain_text(
    saved: dict[str, Path], drafters: Path, packing: str, of_drafter: str | None
) -> None:
    target = load(saved["llama"], packing, torch.bfloat16, llm_int8_skip_modules=[])
    if of_drafter is None:
        drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False)
    else:
        drafter = packed("shared rows", drafters, of_drafter, target)
    assert drafter.dtype == torch.bfloat16
    assert_every_loop_agrees(target, drafter, seed=3)


@pytest.mark.contract
def test_rows_of_a_batch_write_what_each_writes_alone(saved: dict[str, Path]) -> None:
    """Plain decoding of an int8 batch does not: a row's outliers change how the others are computed."""
    target = load(saved["llama"], "int8")
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    prompt = random_prompts(1, seed=5)[0]
    prompts = [prompt, [*prompt[1:], 7], [*prompt[2:], 8, 9]]
    ours = write(target, left_padded(prompts), assistant_model=drafter)
    for row, single in enumerate(prompts):
        inputs = {"input_ids": torch.tensor([single])}
        alone = write(target, inputs)
        assert_same_or_tie(target, inputs, alone, ours[row : row + 1, -alone.shape[1] :])


@pytest.mark.contract
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_hidden_states_are_in_the_compute_dtype(saved: dict[str, Path], packing: str, dtype: torch.dtype) -> None:
    target = load(saved["llama"], packing, dtype)
    binding = random_drafter(target, aux_layers=[1, 2, 4]).binding
    ids = torch.tensor([[3, 4, 5]])
    with binding.capturing():
        shown = target(ids, output_hidden_states=True).hidden_states
        aux = binding.take_aux()
    assert binding.compute_dtype == dtype == aux.dtype
    assert torch.equal(aux[..., :128], torch.cat((shown[1], shown[2]), -1))


@pytest.mark.contract
def test_an_offloaded_head_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    from accelerate import dispatch_model

    target = hf.AutoModelForCausalLM.from_pretrained(saved["llama"], dtype=torch.float32)
    target = dispatch_model(
        target, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    with pytest.raises(IncompatibleTargetError, match=r"LM head of .* is offloaded"):
        random_drafter(target)
    assert not any(hook.__class__.__name__ == "_Tap" for m in target.modules() for hook in m._forward_hooks.values())
    with torch.device("meta"):
        bare = hf.AutoModelForCausalLM.from_config(FAMILIES["llama"])
    with pytest.raises(IncompatibleTargetError, match="device_map"):
        Eagle31Drafter.from_target(bare)


@pytest.mark.contract
@pytest.mark.parametrize("packing", ["nf4", "int8"])
def test_a_head_packed_although_tied_is_refused(saved: dict[str, Path], packing: str) -> None:
    target = load(saved["demo-target"], packing, llm_int8_skip_modules=[])
    with pytest.raises(IncompatibleTargetError, match="also the embedding's"):
        Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)


@pytest.mark.contract
def test_int8_and_plain_targets_are_saved_as_ever(saved: dict[str, Path], tmp_path: Path) -> None:
    target = load(saved["llama"], "int8")
    ids = torch.tensor([[5, 6, 7]])
    random_drafter(target)
    target.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(target(ids).logits, again(ids).logits)


def fp8_checkpoint(folder: Path, target: Any) -> None:
    """`target` as a block-wise FP8 checkpoint, all scales 1."""
    target.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        packed = "_proj" in name
        tensors[name] = tensor.clamp(-400, 400).to(torch.float8_e4m3fn) if packed else tensor
        if packed:
            tensors[f"{name}_scale_inv"] = torch.ones(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic",
                                     "weight_block_size": [128, 128]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.contract
def test_an_fp8_target_that_is_unpacked_here(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**GROUPED | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32})
    fp8_checkpoint(tmp_path, random_target(config))
    if torch.cuda.is_available():
        pytest.skip("a card may have kernels for it")
    target = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False, draft_vocab_size=40)
    assert_every_loop_agrees(target, drafter, seed=0)


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
    for loop in LOOPS.values():
        settings = {"num_assistant_tokens": 3, **loop}
        assert_same_text(target, drafter, left_padded(random_prompts(1, seed=11)), oracle=0, settings=settings)


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
