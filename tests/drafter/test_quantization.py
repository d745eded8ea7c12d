"""Packed weights: targets as transformers loads them through every loop, and drafters packed by ourselves."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import pickle
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.checkpoints import PackingScheme, inspect_checkpoint, packable_shapes, read_checkpoint
from eagle31_hf.drafter.packed_linear import FourBitLinear, Int8Linear, PackedLinear, pack_matrix, packed_modules
from eagle31_hf.errors import CheckpointError, CheckpointFormatError, ConfigurationError, IncompatibleTargetError
from eagle31_hf.memory.drafter_facts import drafter_facts
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.weight_bytes import storage_bytes
from eagle31_hf.target import quantized as target_side
from eagle31_hf.target.quantized import OneTokenArithmetic, gather_head_rows, quantization_cautions
from helpers import (
    DEMO_DRAFTER,
    GROUPED,
    MODELS,
    SIZES,
    assert_same_or_own_tie,
    configured,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    random_prompts,
    random_target,
    target_of,
)
from matrix import matrix

bnb: Any = pytest.importorskip("bitsandbytes")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # LLM.int8 tells of every cast, at every call

PACKINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-dq": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
INNER = {"intermediate_size": 128}  # bitsandbytes' kernel for AVX512-BF16 wants rows of whole blocks
FAMILIES: dict[str, Any] = {
    "llama": hf.LlamaConfig(**GROUPED | INNER),
    "mixtral": hf.MixtralConfig(**GROUPED | INNER, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": hf.GPTNeoXConfig(**SIZES | INNER, rotary_pct=0.5),
}
LOOPS: dict[str, dict[str, Any]] = {
    "chain": {"speculation_loop": "own"},
    "static": {"speculation_loop": "own", "draft_top_k": 3, "draft_tree": "static", "draft_tree_size": 14},
    "dynamic": {"speculation_loop": "own", "draft_top_k": 2, "draft_tree_size": 15},
    "stock": {"speculation_loop": "stock"},
}
HEADS = {"plain head": {}, "packed head": {"llm_int8_skip_modules": []}}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of unpacked targets, and of the demo target."""
    folders = {"demo-target": MODELS / "demo-target", "demo-target, untied": tmp_path_factory.mktemp("untied")}
    demo = copy.deepcopy(target_of("demo-target"))
    demo.config.tie_word_embeddings = False
    demo.lm_head.weight = nn.Parameter(demo.lm_head.weight.detach().clone())
    demo.save_pretrained(folders["demo-target, untied"])
    for name, config in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        random_target(config).save_pretrained(folders[name])
    return folders


def load(folder: Path, packing: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    config = BitsAndBytesConfig(**PACKINGS[packing] | fields)
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()


# --- text of packed targets -------------------------------------------------------------------------------------------


def assert_every_loop_agrees(target: Any, drafter: Eagle31Drafter, prompts: list[list[int]], new_tokens: int) -> int:
    """Returns how many texts ended in a tie."""
    binding, ties = drafter.require_binding(), 0
    assert not binding.tree_unsupported_reason
    for index, prompt in enumerate(prompts):
        inputs = {**left_padded([prompt]), "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        plain = target.generate(**inputs)
        for loop in LOOPS.values():
            with configured(drafter, num_assistant_tokens=4, **loop), oracle_drafts(plain, len(prompt), seed=index):
                ours = target.generate(**inputs, assistant_model=drafter)
            assert drafter.stats is not None
            assert drafter.stats.loop == loop["speculation_loop"]
            ties += assert_same_or_own_tie(binding, plain[0], ours[0], len(prompt))
    return ties


@pytest.mark.slow
@pytest.mark.parametrize(("family", "packing", "head"), matrix([*FAMILIES], [*PACKINGS], [*HEADS]))
def test_packed_targets_write_their_plain_text(saved: dict[str, Path], family: str, packing: str, head: str) -> None:
    target = load(saved[family], packing, **HEADS[head])
    packed_head = target.get_output_embeddings()
    assert (type(packed_head) is nn.Linear) == (head == "plain head")
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False, draft_vocab_size=40)
    assert_every_loop_agrees(target, drafter, random_prompts(1, seed=7), new_tokens=14)


@pytest.mark.contract
@pytest.mark.parametrize("packing", ["nf4", "int8"])
def test_a_packed_target_in_bf16_writes_its_plain_text(saved: dict[str, Path], packing: str) -> None:
    target = load(saved["llama"], packing, torch.bfloat16, llm_int8_skip_modules=[])
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False)
    assert drafter.dtype == torch.bfloat16
    assert_every_loop_agrees(target, drafter, random_prompts(1, seed=3), new_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "head"), [("nf4-dq", "plain head"), ("nf4", "packed head"), ("int8", "packed head")]
)
def test_the_packed_demo_target_writes_its_plain_text(saved: dict[str, Path], packing: str, head: str) -> None:
    target = load(saved["demo-target" if head == "plain head" else "demo-target, untied"], packing, **HEADS[head])
    drafter = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)
    assert_every_loop_agrees(target, drafter, prompts_for("demo-target", 1), new_tokens=16)
    # Its own drafts are still worth something: a wrong hidden state or head row would halve them.
    inputs = left_padded(prompts_for("demo-target", 3)[2:]) | {"do_sample": False, "max_new_tokens": 40}
    target.generate(**inputs, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.acceptance_length > 2


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
        alone = target.generate(torch.tensor([single]), **options)[0]
        assert_same_or_own_tie(drafter.require_binding(), alone, ours[row], len(single))


@pytest.mark.contract
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_hidden_states_are_in_the_compute_dtype(saved: dict[str, Path], packing: str, dtype: torch.dtype) -> None:
    target = load(saved["llama"], packing, dtype)
    binding = random_drafter(target, aux_layers=[1, 2, 4]).require_binding()
    ids = torch.tensor([[3, 4, 5]])
    with binding.capturing():
        shown = target(ids, output_hidden_states=True).hidden_states
        aux = binding.take_aux()
    assert binding.compute_dtype == dtype == aux.dtype
    assert torch.equal(aux[..., :128], torch.cat((shown[1], shown[2]), -1))


# --- LLM.int8 and its outliers ----------------------------------------------------------------------------------------


def int8_layer(bias: bool = False) -> Any:
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 48, bias=bias, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(torch.randn(48, 64) / 8, requires_grad=False).to("cpu")
    return layer.eval()


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.floats(0.5, 4), st.booleans(), st.integers(0, 99))
@torch.no_grad()
def test_one_token_arithmetic_computes_each_row_as_alone(rows: int, size: float, bias: bool, seed: int) -> None:
    layer = int8_layer(bias)
    x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(seed)) * size
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(rows)], 1)
    arithmetic = OneTokenArithmetic(nn.Sequential(layer))
    with arithmetic.active():
        together = layer(x)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(layer), "nothing is left behind"


@torch.no_grad()
def test_stock_int8_mixes_the_rows_of_a_forward() -> None:
    """Why `OneTokenArithmetic` is there. Should this begin to fail, it can go."""
    layer, x = int8_layer(), torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3] = 20  # one token's outlier, in one column
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(6)], 1)
    torch.testing.assert_close(layer(x)[:, 0], alone[:, 0], atol=1e-5, rtol=1e-5)
    assert (layer(x)[:, 1:] - alone[:, 1:]).abs().max() > 1e-4


@pytest.mark.contract
@torch.no_grad()
def test_one_token_arithmetic_goes_behind_acceleratess_hooks_and_nests() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layer = add_hook_to_module(int8_layer(), AlignDevicesHook(execution_device="cpu"))
    x = torch.randn(1, 5, 64) * 3
    alone, hooked = torch.cat([layer(x[:, i : i + 1]) for i in range(5)], 1), layer.forward
    arithmetic = OneTokenArithmetic(nn.Sequential(layer))
    with arithmetic.active():
        with arithmetic.active():
            assert layer.forward is hooked
        torch.testing.assert_close(layer(x), alone)
    assert (layer(x) - alone).abs().max() > 1e-4, "and afterwards it is as it was"


def test_other_targets_have_no_such_layers() -> None:
    assert not OneTokenArithmetic(target_of("llama"))
    assert not OneTokenArithmetic(nn.Sequential(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False, threshold=0.0)))


# --- a packed head ----------------------------------------------------------------------------------------------------


def dequantised(head: Any) -> Tensor:
    """The head's matrix by bitsandbytes' own functions, taken from one that has not run."""
    if isinstance(head, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(head.weight.data, head.weight.SCB).float()
    state = copy.deepcopy(head.weight.quant_state)
    return bnb.functional.dequantize_4bit(head.weight.data, state).float()


@pytest.mark.parametrize("slice_elements", [1, 2**24])
@pytest.mark.parametrize("packing", PACKINGS)
@torch.no_grad()
def test_gathered_rows_are_the_dequantised_ones(
    saved: dict[str, Path], packing: str, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_side, "_SLICE_ELEMENTS", slice_elements)
    head = load(saved["llama"], packing, llm_int8_skip_modules=[]).lm_head
    whole = dequantised(head)
    ids = torch.tensor([5, 0, 95, 17, 18])
    rows = gather_head_rows(head, ids, torch.float32)
    assert rows.shape == (5, 64)
    assert rows.is_contiguous()
    # A CPU with AVX512-BF16 rounds scales and products to bf16.
    atol = 2 * torch.finfo(torch.bfloat16).eps * float(whole.abs().max()) if target_side._is_repacked(head) else 1e-6
    torch.testing.assert_close(rows, whole[ids], atol=atol, rtol=3e-5)  # as inexact is their 1/127
    hidden = torch.randn(7, 64)
    exact = head(hidden)[:, ids]
    assert (hidden @ rows.T - exact).abs().max() < 0.02 * exact.abs().max(), "what the head computes with"


@torch.no_grad()
def test_gathered_rows_leave_out_the_bias_and_ask_any_kind_of_head() -> None:
    class Foreign(nn.Module):
        in_features, out_features = 8, 20

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.randint(-9, 9, (20, 8), dtype=torch.int8))
            self.bias = nn.Parameter(torch.randn(20))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.qweight.to(x.dtype).T / 8 + self.bias

    head, ids = Foreign(), torch.tensor([1, 19])
    rows = gather_head_rows(head, ids, torch.float32)
    torch.testing.assert_close(rows, head.qweight[ids].float() / 8, atol=1e-6, rtol=0)
    with pytest.raises(IncompatibleTargetError, match="Sequential of unknown size"):
        gather_head_rows(nn.Sequential(head), ids, torch.float32)


def test_rows_of_a_plain_head_are_taken_by_index() -> None:
    head, ids = target_of("llama").lm_head, torch.tensor([4, 2])
    assert torch.equal(gather_head_rows(head, ids, torch.float32), head.weight[ids])


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
def test_a_repacked_target_refuses_to_be_saved(saved: dict[str, Path], tmp_path: Path) -> None:
    target = load(saved["llama"], "nf4")
    target.save_pretrained(tmp_path)  # not run yet
    random_drafter(target)
    layer = target.model.layers[0].mlp.up_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes repacks nothing on this CPU")
    assert layer.weight.quant_state.packing_format_for_cpu, "the self-test ran it"
    before = layer.weight.data.clone()
    for save in (target.state_dict, lambda: target.save_pretrained(tmp_path / "again")):
        with pytest.raises(CheckpointError, match=r"AVX512-BF16.*Load the target again"):
            save()
    assert torch.equal(layer.weight.data, before), "asking does no harm"
    assert not (tmp_path / "again" / "model.safetensors").exists()


@pytest.mark.contract
def test_int8_and_plain_targets_are_saved_as_ever(saved: dict[str, Path], tmp_path: Path) -> None:
    target = load(saved["llama"], "int8")
    ids = torch.tensor([[5, 6, 7]])
    random_drafter(target)
    target.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(target(ids).logits, again(ids).logits)


@pytest.mark.contract
def test_experts_that_stay_unpacked_are_told_once(saved: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    target_side._warned.clear()
    target = load(saved["mixtral"], "nf4")
    (caution,) = quantization_cautions(target)
    assert "experts" in caution
    assert "GiB" in caution
    random_drafter(target)
    random_drafter(target, seed=3)
    assert sum("experts" in record.message for record in caplog.records) == 1
    assert not quantization_cautions(load(saved["llama"], "nf4"))
    assert not quantization_cautions(load(saved["llama"], "int8"))
    assert not quantization_cautions(target_of("mixtral"))


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
def test_an_fp8_target_is_unpacked_here_and_that_is_told(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**GROUPED | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32})
    fp8_checkpoint(tmp_path, random_target(config))
    if torch.cuda.is_available():
        pytest.skip("a card may have kernels for it")
    target = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (caution,) = quantization_cautions(target)
    assert "unpacked to torch.float32" in caution
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_lm_head=False, draft_vocab_size=40)
    assert_every_loop_agrees(target, drafter, random_prompts(1), new_tokens=8)


@pytest.mark.contract
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "mxfp4"])
def test_methods_without_packed_weights_here_are_told(method: str) -> None:
    target = copy.deepcopy(target_of("llama"))
    target.config.quantization_config = {"quant_method": method}
    (caution,) = quantization_cautions(target)
    assert f"({method})" in caution


# --- packed matrices --------------------------------------------------------------------------------------------------

SCHEMES_OF_DRAFTERS = {"int8": PackingScheme("int8"), "nf4": PackingScheme("nf4"), "nf4-dq": PackingScheme("nf4", True),
                       "fp4": PackingScheme("fp4")}  # fmt: skip
# Of a row's, of a block's largest weight; bitsandbytes' int8 product comes out in fp16.
LARGEST_ERROR = {"int8": 0.5 / 127 + 2**-11, "nf4": 0.17, "nf4-dq": 0.18, "fp4": 0.18}
DTYPES = ["float32", "bfloat16", "float16"]
shapes = st.tuples(st.integers(1, 40), st.sampled_from([64, 128, 192, 320]))


def matrix_of(packed: PackedLinear) -> Tensor:
    """What a packed layer multiplies with: its answers to the unit vectors, in fp32."""
    return packed(torch.eye(packed.in_features)).T


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from(list(SCHEMES_OF_DRAFTERS)), st.integers(0, 99))
@torch.no_grad()
def test_a_packed_matrix_is_near_its_own(shape: tuple[int, int], name: str, seed: int) -> None:
    scheme = SCHEMES_OF_DRAFTERS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    packed = pack_matrix(weight, scheme)
    error = (matrix_of(packed) - weight).abs().max()
    assert error <= LARGEST_ERROR[name] * weight.abs().max() + 1e-5
    infos = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in packed.named_buffers()}
    assert infos == {n: (info.shape, info.dtype) for n, info in scheme.tensor_infos(*shape).items()}
    assert storage_bytes(packed) == scheme.packed_bytes(*shape)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 7), st.sampled_from(list(SCHEMES_OF_DRAFTERS)), st.sampled_from(DTYPES))
@torch.no_grad()
def test_rows_of_a_packed_product_are_independent(rows: int, name: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    packed = pack_matrix(torch.randn(32, 64), SCHEMES_OF_DRAFTERS[name], torch.randn(32)).to(kind)
    x = torch.randn(2, rows, 64).to(kind)
    x[0, 0, 5] = 40
    out = packed(x)
    assert out.shape == (2, rows, 32)
    assert out.dtype == kind
    alone = torch.stack([torch.cat([packed(x[b, i : i + 1]) for i in range(rows)]) for b in range(2)])
    bound = 1e-5 if kind == torch.float32 else 4 * torch.finfo(kind).eps
    assert (out - alone).abs().max() <= bound * alone.abs().max()


@pytest.mark.parametrize("name", SCHEMES_OF_DRAFTERS)
@torch.no_grad()
def test_a_change_of_dtype_leaves_packed_numbers_alone(name: str) -> None:
    packed = pack_matrix(torch.randn(32, 64), SCHEMES_OF_DRAFTERS[name], torch.randn(32))
    before, whole = {n: t.clone() for n, t in packed.named_buffers()}, matrix_of(packed)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        packed.to(dtype=dtype)
        assert packed.bias is not None
        assert packed.bias.dtype == dtype
    assert all(torch.equal(before[n], t) and before[n].dtype == t.dtype for n, t in packed.named_buffers())
    packed.half().float()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(packed)))
    packed.bias = twin.bias = None
    assert torch.equal(matrix_of(twin), matrix_of(packed))
    assert whole.dtype == torch.float32


@pytest.mark.parametrize("columns", [32, 96, 100, 128])
def test_rows_that_are_no_whole_blocks_stay_as_they_are(columns: int) -> None:
    shape = (512, columns)
    assert PackingScheme("nf4", True).packs("o_proj", shape, 2) == (columns % 64 == 0)
    assert PackingScheme("int8").packs("o_proj", shape, 2)
    assert not PackingScheme("int8", skip=("o_proj",)).packs("layers.0.self_attn.o_proj", shape, 2)
    assert not PackingScheme("nf4", True).packs("o_proj", (8, 64), 2), "tables and scales would take more"


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.randn(4, 64)
    weight[2] = 0
    assert torch.equal(matrix_of(pack_matrix(weight, PackingScheme("int8")))[2], torch.zeros(64))


# --- packed drafters --------------------------------------------------------------------------------------------------

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle 3.1": {"aux_norm": "per_slot", "norm_output": True, "draft_vocab_size": 40},
    "biases": {"aux_norm": "concatenated", "fc_bias": True, "attention_bias": True, "mlp_bias": True},
    "own embedding": {"own_embedding": True},
    "shared rows": {"own_lm_head": False, "draft_vocab_size": 40},
    "shared head": {"own_lm_head": False},
    "two layers": {"num_hidden_layers": 2},
}


@cache
def drafter_folder(name: str, parent: Path) -> Path:
    """A random drafter for `target_of("llama")`, written unpacked."""
    folder = parent / name.replace(" ", "-")
    random_drafter(target_of("llama"), aux_layers=[1, 2, 4], **DRAFTERS[name]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def bits(scheme: str, **fields: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**PACKINGS[scheme] | fields)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_matrices_are_packed_and_nothing_else(drafters: Path, name: str, packing: str) -> None:
    drafter = Eagle31Drafter.from_pretrained(
        drafter_folder(name, drafters), target=target_of("llama"), quantization_config=bits(packing)
    )
    scheme = drafter.packing
    assert scheme == SCHEMES_OF_DRAFTERS[packing]
    worth = {n for n, shape in packable_shapes(drafter.config).items() if scheme.packs(n, shape, 4)}
    assert packed_modules(drafter).keys() == worth
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
    drafter = Eagle31Drafter.from_pretrained(
        drafter_folder(name, drafters), target=target, quantization_config=bits(packing)
    )
    held = storage_bytes(drafter) + sum(
        rows.untyped_storage().nbytes() if isinstance(rows, Tensor) else storage_bytes(rows)
        for rows in drafter._head_rows
    )
    precision = SCHEMES[f"bnb-{packing}"].__class__(**{**vars(SCHEMES[f"bnb-{packing}"]), "dtype": dtype})
    facts = drafter_facts(drafter.config, precision.dtype_bytes)
    assert facts.weight_bytes(precision) + facts.head_bytes(precision) == held


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_saved_and_read_again_it_is_the_same(
    drafters: Path, tmp_path: Path, name: str, packing: str, with_target: bool
) -> None:
    target = target_of("llama") if with_target else None
    folder = drafter_folder(name, drafters)
    packed = Eagle31Drafter.from_pretrained(folder, target=target, quantization_config=bits(packing))
    hidden, ids = torch.randn(1, 3, 64), torch.tensor([[3, 4, 5]])

    @torch.no_grad()
    def outputs(drafter: Eagle31Drafter) -> list[Tensor]:
        embedded = drafter.embed(ids) if with_target or drafter.config.own_embedding else hidden
        out = drafter.decode(embedded, hidden, drafter.rotary(torch.arange(3)[None]))
        has_head = with_target or drafter.config.own_lm_head
        return [out.normed, out.feedback, *([drafter.draft_logits(out.normed)] if has_head else [])]

    before = outputs(packed)  # running it must not change what is written
    packed.save_pretrained(tmp_path)
    for options in ({}, {"quantization_config": bits(packing)}):
        again = Eagle31Drafter.from_pretrained(tmp_path, target=target, **options)
        ours, theirs = packed.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in ours)
        assert again.packing == packed.packing
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(again), strict=True))
    again.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    scales = read_checkpoint(tmp_path / "bf16").packed
    assert all(torch.equal(tensor, ours[n]) for n, tensor in scales.items())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["eagle 3.1", "shared rows"])
def test_packed_drafters_write_the_plain_text(drafters: Path, name: str, packing: str) -> None:
    target = target_of("llama")
    drafter = Eagle31Drafter.from_pretrained(
        drafter_folder(name, drafters), target=target, quantization_config=bits(packing)
    )
    (prompt,) = random_prompts(1, seed=11)
    inputs = {**left_padded([prompt]), "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs)
    for loop in LOOPS.values():
        with configured(drafter, num_assistant_tokens=3, **loop), oracle_drafts(plain, len(prompt)):
            assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)


def test_gathered_rows_are_packed_too(drafters: Path) -> None:
    folder = drafter_folder("shared rows", drafters)
    full = Eagle31Drafter.from_pretrained(folder, target=target_of("llama"))
    packed = Eagle31Drafter.from_pretrained(folder, target=target_of("llama"), quantization_config=bits("int8"))
    kept = bits("int8", llm_int8_skip_modules=["lm_head"])
    skipped = Eagle31Drafter.from_pretrained(folder, target=target_of("llama"), quantization_config=kept)
    (rows,), (exact,) = packed._head_rows, full._head_rows
    assert isinstance(rows, Int8Linear)
    assert isinstance(exact, Tensor)
    assert (matrix_of(rows) - exact).abs().max() <= exact.abs().max() / 127
    assert torch.equal(skipped._head_rows[0], exact)
    assert isinstance(skipped.layers[0].mlp.down_proj, Int8Linear)
    hidden = torch.randn(2, 3, 64)
    torch.testing.assert_close(packed.draft_logits(hidden), rows(hidden))
    packed.detach()
    assert not packed._head_rows


def test_a_packed_drafter_beside_a_packed_target(saved: dict[str, Path], drafters: Path) -> None:
    target = load(saved["llama"], "nf4", torch.bfloat16, llm_int8_skip_modules=[])
    drafter = Eagle31Drafter.from_pretrained(
        drafter_folder("shared rows", drafters), target=target, quantization_config=bits("nf4-dq")
    )
    assert drafter.dtype == torch.bfloat16
    assert isinstance(drafter.layers[0].self_attn.o_proj, FourBitLinear)
    assert_every_loop_agrees(target, drafter, random_prompts(1, seed=2), new_tokens=10)


def test_what_is_packed_is_told_by_inspect(drafters: Path, tmp_path: Path) -> None:
    folder = drafter_folder("eagle 3.1", drafters)
    Eagle31Drafter.from_pretrained(folder, quantization_config=bits("nf4")).save_pretrained(tmp_path)
    packed, plain = inspect_checkpoint(tmp_path), inspect_checkpoint(folder)
    assert packed.parameters == plain.parameters
    assert packed.stored_bytes < plain.stored_bytes / 2
    for verdict in packed.engines:
        assert not verdict.reads
        assert any("packed" in reason for reason in verdict.reasons)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert PackingScheme.of(config) == PackingScheme("nf4")


@torch.no_grad()
def drafted(drafter: Eagle31Drafter, ids: Tensor) -> Tensor:
    """What the drafter holds likeliest after each true token of a text `(1, T)`."""
    binding = drafter.require_binding()
    with binding.capturing():
        binding.model(ids)
        hidden = drafter.fuse_aux(binding.take_aux()[:, :-1])
    rotary = drafter.rotary(torch.arange(ids.shape[1] - 1)[None])
    return drafter.draft_logits(drafter.decode(drafter.embed(ids[:, 1:]), hidden, rotary).normed).argmax(-1)


def test_packed_demo_drafters_draft_nearly_the_same() -> None:
    """Acceptance lengths over many prompts are in docs/quantization.md; a wrong scale or row would agree by chance."""
    target = target_of("demo-target")
    full = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)
    texts = [torch.tensor([prompt]) for prompt in prompts_for("demo-target", 3)]
    for packing, least in {"int8": 0.97, "nf4": 0.85, "nf4-dq": 0.85}.items():
        packed = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target, quantization_config=bits(packing))
        same = torch.cat([drafted(packed, ids) == drafted(full, ids) for ids in texts], -1)
        assert float(same.float().mean()) > least, packing


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "packed by bitsandbytes"),
        ({"load_in_4bit": False}, "load_in_8bit=True"),
        (17, "got quantization_config=17"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int3"}, "'int3'; wanted one of int8, nf4, fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "cannot be trained"),
    ],
)
def test_settings_that_cannot_be_followed(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Eagle31Drafter.from_pretrained(DEMO_DRAFTER, quantization_config=config)


@pytest.mark.parametrize(("version", "message"), [(None, "'bitsandbytes>=0.50'"), ("0.49.1", "0.50 or later")])
def test_without_bitsandbytes_one_is_told_what_to_install(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(hf.LlamaConfig(**GROUPED))

    def imported(name: str) -> Any:
        if version is None:
            raise ImportError(f"No module named {name!r}")
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ConfigurationError, match=message):
        Eagle31Drafter.from_pretrained(DEMO_DRAFTER, quantization_config={"load_in_8bit": True}, target=target)
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_a_packed_checkpoint_is_not_packed_again(drafters: Path, tmp_path: Path) -> None:
    folder = drafter_folder("eagle 3.1", drafters)
    packed = Eagle31Drafter.from_pretrained(folder, quantization_config=bits("nf4"))
    packed.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="packed already"):
        Eagle31Drafter.from_pretrained(tmp_path, quantization_config=bits("int8"))
    with pytest.raises(ConfigurationError, match="speculators format has no words for weights packed"):
        packed.save_pretrained(tmp_path / "other", format="speculators")


@pytest.mark.parametrize("damage", ["scheme", "missing", "shape", "unmarked", "spare", "nan"])
def test_damaged_packed_checkpoints_are_refused(drafters: Path, tmp_path: Path, damage: str) -> None:
    folder = drafter_folder("eagle 3.1", drafters)
    Eagle31Drafter.from_pretrained(folder, quantization_config=bits("nf4")).save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    name = "midlayer.self_attn.o_proj"
    if damage == "scheme":
        config["quantization_config"]["bnb_4bit_use_double_quant"] = True
    elif damage == "unmarked":
        del config["quantization_config"]["layout"]
    elif damage == "missing":
        del tensors[f"{name}.absmax"]
    elif damage == "shape":
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:-1]
    elif damage == "spare":
        tensors[f"{name}.offset"] = torch.zeros(())
    else:
        tensors[f"{name}.absmax"][0] = float("nan")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError):
        Eagle31Drafter.from_pretrained(tmp_path)


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
    assert peaks["full"] > peaks["int8"] > peaks["nf4"]
    for precision, peak in peaks.items():
        plan = plan_memory(config, card=peak + 2**20, **options)
        assert plan.fits
        assert plan.settings.speculates
        assert plan.settings.drafter_precision in (precision, "full")
    assert plan.settings.drafter_precision == "nf4"
