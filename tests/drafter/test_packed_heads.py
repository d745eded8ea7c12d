"""Rows of a packed head, gathered for a drafter, are what the head computes with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_pairs import PACKINGS, load
from torch import Tensor, nn

from eagle31_hf.errors import IncompatibleTargetError
from eagle31_hf.targets import quantized as target_side
from eagle31_hf.targets.quantized import gather_head_rows
from helpers import target_of

bnb: Any = pytest.importorskip("bitsandbytes")


def dequantised(head: Any) -> Tensor:
    """The head's matrix by bitsandbytes' own functions, taken from one that has not run."""
    if isinstance(head, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(head.weight.data, head.weight.SCB).float()
    state = copy.deepcopy(head.weight.quant_state)
    return bnb.functional.dequantize_4bit(head.weight.data, state).float()


def is_repacked(head: Any) -> bool:
    """By bitsandbytes, for a CPU with AVX512-BF16."""
    return bool(getattr(getattr(head.weight, "quant_state", None), "packing_format_for_cpu", False))


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
    atol = 2 * torch.finfo(torch.bfloat16).eps * float(whole.abs().max()) if is_repacked(head) else 1e-6
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
