"""Packed matrices: near the ones they were, row by row, in as many bytes as planned; rows of packed heads; LLM.int8.

Rows of an LLM.int8 forward are computed as each would be alone, outliers or not.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_pairs import LARGEST_ERROR, SCHEMES_OF_DRAFTERS, load, matrix_of
from torch import Tensor, nn

from eagle31_hf.drafter.packed_linear import pack_matrix
from eagle31_hf.memory.weights import storage_bytes
from eagle31_hf.targets import quantized as target_side
from eagle31_hf.targets.quantized import OneTokenArithmetic, gather_head_rows
from helpers import PACKINGS, target_of

bnb: Any = pytest.importorskip("bitsandbytes")

shapes = st.tuples(st.integers(1, 40), st.sampled_from([64, 128, 192, 320]))


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from(list(SCHEMES_OF_DRAFTERS)), st.integers(0, 99))
@torch.no_grad()
def test_a_packed_matrix_is_near_its_own(shape: tuple[int, int], name: str, seed: int) -> None:
    scheme = SCHEMES_OF_DRAFTERS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    packed = pack_matrix(weight, scheme)
    error = (matrix_of(packed) - weight).abs().max()
    assert error <= LARGEST_ERROR[name] * weight.abs().max() + 1e-5
    assert storage_bytes(packed) == scheme.matrix_bytes(*shape)


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
    in_4_bits, in_8_bits = SCHEMES_OF_DRAFTERS["nf4-dq"], SCHEMES_OF_DRAFTERS["int8"]
    assert in_4_bits.packs(shape, 2) == (columns % 64 == 0)
    assert in_8_bits.packs(shape, 2)
    assert not replace(in_8_bits, skip_modules=("o_proj",)).packs(shape, 2, "layers.0.self_attn.o_proj")
    assert not in_4_bits.packs((8, 64), 2), "tables and scales would take more"


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.randn(4, 64)
    weight[2] = 0
    assert torch.equal(matrix_of(pack_matrix(weight, SCHEMES_OF_DRAFTERS["int8"]))[2], torch.zeros(64))


# --- rows of a packed head ------------------------------------------------------------------------------------------


def dequantised(head: Any) -> Tensor:
    """The head's matrix by bitsandbytes' own functions, taken from one that has not run."""
    if isinstance(head, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(head.weight.data, head.weight.SCB).float()
    state = copy.deepcopy(head.weight.quant_state)
    return bnb.functional.dequantize_4bit(head.weight.data, state).float()


def is_repacked(head: Any) -> bool:
    """By bitsandbytes, for a CPU with AVX512-BF16."""
    return bool(getattr(getattr(head.weight, "quant_state", None), "packing_format_for_cpu", False))


@pytest.mark.parametrize("units", [7, 64])
@pytest.mark.parametrize("packing", PACKINGS)
@torch.no_grad()
def test_gathered_rows_are_the_dequantised_ones(
    saved: dict[str, Path], packing: str, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_side, "_UNITS", units)
    head = load(saved["llama"], packing, llm_int8_skip_modules=[]).lm_head
    whole = dequantised(head)
    ids = torch.tensor([5, 0, 95, 17, 18])
    rows = gather_head_rows(head, ids, 64, torch.float32)
    assert rows.shape == (5, 64)
    assert rows.is_contiguous()
    # A CPU with AVX512-BF16 rounds scales and products to bf16.
    atol = 2 * torch.finfo(torch.bfloat16).eps * float(whole.abs().max()) if is_repacked(head) else 1e-6
    torch.testing.assert_close(rows, whole[ids], atol=atol, rtol=3e-5)  # as inexact is their 1/127
    hidden = torch.randn(7, 64)
    exact = head(hidden)[:, ids]
    assert (hidden @ rows.T - exact).abs().max() < 0.02 * exact.abs().max(), "what the head computes with"


@torch.no_grad()
def test_gathered_rows_leave_out_the_bias_and_ask_any_kind_of_head() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.randint(-9, 9, (20, 8), dtype=torch.int8))
            self.bias = nn.Parameter(torch.randn(20))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.qweight.to(x.dtype).T / 8 + self.bias

    head, ids = Foreign(), torch.tensor([1, 19])
    rows = gather_head_rows(head, ids, 8, torch.float32)
    torch.testing.assert_close(rows, head.qweight[ids].float() / 8, atol=1e-6, rtol=0)


def test_rows_of_a_plain_head_are_taken_by_index() -> None:
    head, ids = target_of("llama").lm_head, torch.tensor([4, 2])
    assert torch.equal(gather_head_rows(head, ids, 64, torch.float32), head.weight[ids])


# --- LLM.int8 -------------------------------------------------------------------------------------------------------


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
