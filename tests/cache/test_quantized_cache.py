"""Keys and values in 8 bits: how they are rounded and chosen (test_cache_histories: what is held)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror import DTYPES, rounded
from torch import Tensor

from eagle31_hf.cache.quantized import LARGEST_CODE, encode
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.settings import Eagle31GenerationConfig
from helpers import configured, drafter_of, target_of

# --- rounding ---------------------------------------------------------------------------------------------------------


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


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_cache_type_is_kept_with_the_settings(tmp_path: Path) -> None:
    assert Eagle31GenerationConfig().stored_cache_type == "full"
    Eagle31GenerationConfig(cache_type="int8").save_pretrained(tmp_path)
    assert Eagle31GenerationConfig.from_pretrained(tmp_path).stored_cache_type == "int8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_type": "int4"}, "cache_type is 'int4'"),
        ({"cache_type": None}, "cache_type is None"),
        ({"cache_type": "int8", "speculation_loop": "plain"}, "only our own loop"),
        ({"cache_type": "fp8"}, "was removed in 0.2.0: int8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    """One alone where it is set, those that do not go together by the next text."""
    with pytest.raises(ConfigurationError, match=message):
        Eagle31GenerationConfig(**fields).check()
    with pytest.raises(ConfigurationError, match=message), configured(drafter_of("llama"), **fields) as eagle:
        target_of("llama").generate(torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2)


def test_another_loop_says_that_it_does_not_use_the_cache_type() -> None:
    with configured(drafter_of("llama"), cache_type="int8") as eagle:
        target_of("llama").generate(
            torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2, cache_implementation="static"
        )
        assert eagle.stats.loop == "plain"
        assert eagle.stats.cache_type == "full"
        assert "cache_type is not used there" in eagle.stats.reason
