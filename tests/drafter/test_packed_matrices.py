"""Packed matrices: near the ones they were, row by row, and in as many bytes as planned."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_pairs import SCHEMES_OF_DRAFTERS, matrix_of

from eagle31_hf.drafter.packed_linear import PackingScheme, pack_matrix
from eagle31_hf.memory.quantization_schemes import packed_matrix_bytes
from eagle31_hf.memory.weight_bytes import storage_bytes

pytest.importorskip("bitsandbytes")

# Of a row's, of a block's largest weight; bitsandbytes' int8 product comes out in fp16.
LARGEST_ERROR = {"int8": 0.5 / 127 + 2**-11, "nf4": 0.17, "nf4-dq": 0.18, "fp4": 0.18}
DTYPES = ["float32", "bfloat16", "float16"]
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
    assert storage_bytes(packed) == packed_matrix_bytes(scheme.method, scheme.double_quant, *shape)


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
