"""Draws follow their weights, with and without replacement, and never take what has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from counted_outcomes import DRAFTERS, P_VALUE, ROWS, P, V, chi_square, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.sampling import draw as drawing
from eagle31_hf.sampling.draw import draw, draw_numbers, draw_without_replacement


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize("width", [None, V])
def test_draw_follows_weights_and_skips_zeros(width: int | None) -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 0.0])
    (numbers,) = draw_numbers((ROWS, 1), width, weights.device, seeded()).unbind(1)
    for outcomes in (draw(weights.expand(ROWS, V), numbers=numbers), draw(weights.expand(ROWS, V), seeded())):
        assert chi_square(outcomes, weights / 6) > P_VALUE
        assert set(outcomes.tolist()) == {1, 2, 4}


@pytest.mark.usefixtures("way_to_draw")
def test_draw_keeps_the_share_of_rare_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # A float32 running sum near 1 moves in steps of 6e-8 and would lose this token's 1e-9 altogether.
    weights = torch.tensor([[1.0, 1e-9, 0.0]])
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), 1.0 - 0.9e-9, dtype=torch.float64))
    assert draw(weights).item() == 1
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), 1.0 - 1.1e-9, dtype=torch.float64))
    assert draw(weights).item() == 0


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize(("uniform", "index"), [(0.0, 1), (1.0 - 2.0**-53, 2)])
def test_draw_at_either_end_skips_zeros(monkeypatch: pytest.MonkeyPatch, uniform: float, index: int) -> None:
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), uniform, dtype=torch.float64))
    assert draw(torch.tensor([[0.0, 0.3, 0.4, 0.0]])).item() == index


@pytest.mark.parametrize("invert", [drawing._invert, drawing._invert_by_blocks])
@given(weights=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=200).filter(any), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_draw_never_returns_an_index_of_weight_zero(
    invert: Callable[[Tensor, Tensor], Tensor], weights: list[float], seed: int
) -> None:
    row = torch.tensor(weights)
    numbers = drawing.uniform_numbers((50, 1), row.device, seeded(seed))
    numbers[0], numbers[1] = 0.0, 1.0 - 2.0**-53
    drawn = invert(row.expand(50, -1), numbers)
    assert (row[drawn] > 0).all()


@pytest.mark.parametrize("width", [64, 8192, 10_001])
def test_blocks_draw_what_the_running_sum_draws(width: int) -> None:
    weights = torch.softmax(4 * torch.randn(3, 40, width, generator=seeded(1)), -1)
    numbers = drawing.uniform_numbers((3, 40, 1), weights.device, seeded(2))
    assert torch.equal(drawing._invert_by_blocks(weights, numbers), drawing._invert(weights, numbers))


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_a_row_nothing_can_be_drawn_from_yields_no_token(weight: float) -> None:
    drawn = draw(torch.tensor([[weight] * 5, [1.0] * 5]), seeded())
    assert drawn[0] == 5
    assert drawn[1] < 5


def test_draw_without_replacement_is_sequential_drawing() -> None:
    pairs = draw_without_replacement(P.expand(ROWS, V), 2, seeded())
    expected = torch.zeros(V, V)
    for i in range(V):
        for j in range(V):
            expected[i, j] = P[i] * P[j] / (1 - P[i]) if i != j else 0
    assert chi_square(pairs[:, 0] * V + pairs[:, 1], expected.flatten()) > P_VALUE


def test_draw_without_replacement_takes_zeros_last() -> None:
    drawn = draw_without_replacement(DRAFTERS["half_support"].expand(500, V), 4, seeded())
    assert (drawn[:, :2].sort(1).values == torch.tensor([1, 3])).all()
    assert all(len(set(row)) == 4 for row in drawn.tolist())
