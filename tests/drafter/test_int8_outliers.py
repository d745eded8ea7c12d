"""LLM.int8 and its outliers: rows of a forward are computed as each would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eagle31_hf.targets.quantized import OneTokenArithmetic
from helpers import target_of

bnb: Any = pytest.importorskip("bitsandbytes")


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
