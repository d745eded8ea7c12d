"""Packed targets as transformers loads them: every loop writes their plain text; what is refused or warned about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packed_pairs import FAMILIES, PACKINGS, assert_every_loop_agrees, load, packed
from safetensors.torch import load_file, save_file
from torch import nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import IncompatibleTargetError
from helpers import (
    DEMO_DRAFTER,
    GROUPED,
    assert_same_or_tie,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
)
from matrix import matrix

pytest.importorskip("bitsandbytes")

HEADS = {"plain head": {}, "packed head": {"llm_int8_skip_modules": []}}


# --- text of packed targets -------------------------------------------------------------------------------------------


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
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ours = target.generate(**left_padded(prompts), **options, assistant_model=drafter)
    for row, single in enumerate(prompts):
        inputs = {"input_ids": torch.tensor([single])}
        alone = target.generate(**inputs, **options)
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


# --- what is refused or warned about ----------------------------------------------------------------------------------


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
