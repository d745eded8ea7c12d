"""Vectors in 8 bits: rounded as the formula says, once, by no more than a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror import DTYPES, rounded
from torch import Tensor

from eagle31_hf.cache.quantized import LARGEST_CODE, encode


def naive_rounded(vector: Sequence[float]) -> list[float]:
    """One vector, in double precision and without looking at a bit."""
    largest, scale = max(abs(x) for x in vector), 2.0**-24
    while scale * LARGEST_CODE < largest:
        scale *= 2
    return [round(x / scale) * scale for x in vector]


@st.composite
def vectors(draw: st.DrawFn) -> tuple[torch.dtype, Tensor]:
    """Vectors of very unlike size, with zeros, and some that sit on the border of two scales."""
    dtype = draw(st.sampled_from(DTYPES))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        size = 2.0 ** draw(st.integers(-30, 14))
        factors = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0, 127 / 128, 255 / 256]))
        rows.append([size * draw(factors) for _ in range(6)])
    return dtype, torch.tensor(rows, dtype=torch.float64).to(dtype)[None, :, None]  # (1, rows, 1, 6)


@given(vectors())
@settings(max_examples=150, deadline=None)
def test_rounding_is_what_the_formula_says_and_happens_once(case: tuple[torch.dtype, Tensor]) -> None:
    dtype, states = case
    codes, scales = encode(states)
    assert codes.dtype == torch.int8
    assert scales.dtype == dtype
    once = rounded(states)
    wanted = [naive_rounded(vector) for vector in states[0, :, 0].double().tolist()]
    assert torch.equal(once[0, :, 0], torch.tensor(wanted, dtype=torch.float64).to(dtype))
    assert torch.equal(rounded(once), once)
    for other in DTYPES:  # at most seven bits times a power of two: only fp16 is ever out of its range
        held = once.to(other)
        assert torch.equal(held.double(), once.double()) or other == torch.float16
        if held.isfinite().all():
            assert torch.equal(rounded(held), held)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_bounded_and_nothing_becomes_nan(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 3, 50, 64).to(dtype) * torch.logspace(-3, 3, 50, base=10.0)[:, None].to(dtype)
    states[:, :, 7] = 0
    back = rounded(states)
    largest = states.abs().amax(-1, keepdim=True).float()
    error = (back - states).abs().float()
    assert (error <= largest / 127).all(), "half a step of at most 1/63.5 of the largest"
    assert error.max() > 0
    assert not back[:, :, 7].any()
    assert back.isfinite().all()
