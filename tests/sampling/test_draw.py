"""Sampling as arg-max: the noise is plain `generate`'s, and drafts chosen by it agree as often as the formula says."""

from __future__ import annotations

import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.shape import noise_bytes
from eagle31_hf.graphs.captured import ForbidsHostWaits
from eagle31_hf.sampling.acceptance import accept_chosen, match_prefix
from eagle31_hf.sampling.draw import (
    FreshNoise,
    PositionNoise,
    argmax,
    choose,
    perturbed,
    random_state,
    why_noise_is_unknown,
)
from eagle31_hf.training.objectives import agreement
from helpers import grown_tree, seeded

CPU = torch.device("cpu")


def taken_by_generate(rows: int, vocabulary: int, count: int, seed: int) -> list[Tensor]:
    """What plain `generate` takes: a tensor for each position."""
    with seeded(seed):
        return [torch.empty(rows, vocabulary).exponential_() for _ in range(count)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocabulary", [7, 8192])
def test_multinomial_is_the_choice_by_noise(rows: int, vocabulary: int) -> None:
    scores = 3 * torch.randn(40, rows, vocabulary, generator=torch.Generator().manual_seed(1))
    with seeded(2):
        drawn = torch.stack([torch.multinomial(each.softmax(-1), 1).squeeze(1) for each in scores])
        left = torch.get_rng_state()
    with seeded(2):
        noise = PositionNoise(rows, vocabulary, CPU)
        window = torch.cat([noise.window(range(rows), [at] * rows, 8) for at in range(0, 40, 8)], 1)
        assert torch.equal(choose(scores, window.transpose(0, 1)), drawn)
        assert torch.equal(torch.get_rng_state(), left)
    assert why_noise_is_unknown(CPU) is None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rows_out_of_step_get_the_noise_of_their_own_positions(rows: int, seed: int) -> None:
    """Rows advance by lot, some are left out for a while, and now and then one looks back."""
    expected = taken_by_generate(rows, 11, 300, seed)
    with seeded(seed):
        noise, dice, places = PositionNoise(rows, 11, CPU), random.Random(seed), [0] * rows
        for _ in range(60):
            count, asked = dice.randint(1, 9), [row for row in range(rows) if dice.random() < 0.8]
            starts = [max(places[row] - dice.choice((0, 0, 0, 12)), 0) for row in asked]
            if not asked:
                continue
            window = noise.window(asked, starts, count)
            for place, (row, start) in enumerate(zip(asked, starts, strict=True)):
                for offset in range(count):
                    assert torch.equal(window[place, offset], expected[start + offset][row])
            for row in asked:
                places[row] = min(places[row] + dice.randint(0, 4 if row else 1), 200)
        assert max(places) > 2 * min(places) or rows == 1, "nobody was out of step"
        assert noise.settle(max(places))
        left = torch.get_rng_state()
    with seeded(seed):
        for _ in range(max(places)):
            torch.empty(rows, 11).exponential_()
        assert torch.equal(torch.get_rng_state(), left)


def test_noise_of_a_long_text_is_bounded() -> None:
    with seeded(0):
        noise = PositionNoise(1, 8, CPU)
        sizes = set()
        for position in range(2000):
            noise.window([0], [position], 6)
            sizes.add((noise._ring.nbytes, min(len(noise._states), 400)))
    assert max(size for size, _ in sizes) == noise_bytes(1, 8, 6) == 2 * (16 + 6) * 8 * 4
    batch = PositionNoise(3, 8, CPU)
    batch.window(range(3), [0, 4, 1], 6)
    assert batch._ring.nbytes == noise_bytes(3, 8, 6)
    assert max(states for _, states in sizes) < 300


def test_who_else_takes_random_numbers_is_noticed() -> None:
    with seeded(0):
        noise = PositionNoise(1, 8, CPU)
        noise.window([0], [0], 4)
        torch.rand(1)
        left = random_state(CPU)
        assert not noise.settle(2)
        assert torch.equal(random_state(CPU), left), "somebody else's numbers are left alone"


def test_a_generator_of_ones_own_leaves_torchs_alone() -> None:
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(5)
    own = PositionNoise(1, 9, CPU, generator).window([0], [0], 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own[0], torch.cat(taken_by_generate(1, 9, 3, 5)))


@pytest.mark.parametrize("score", [float("nan"), float("-inf")])
def test_a_row_nothing_can_be_chosen_from_yields_no_token(score: float) -> None:
    scores = torch.stack((torch.full((5,), score), torch.zeros(5)))
    chosen = choose(scores, torch.ones(2, 5))
    assert chosen.tolist() == [5, 0]


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_drafts_by_the_same_noise_agree_as_the_formula_says(spread: float) -> None:
    """`agreement` given the target's token, on average over what it is; and how often that is at least."""
    with seeded(3):
        z = 2 * torch.randn(24)
        draft = z + spread * torch.randn(24)
        noise = torch.empty(40_000, 24).exponential_()
    p, q = z.softmax(-1), draft.softmax(-1)
    target, drafted = choose(z.expand_as(noise), noise), argmax(perturbed(draft.expand_as(noise), noise))
    chances = agreement(p.expand(24, -1), q.expand(24, -1), torch.arange(24))
    found, expected = float((target == drafted).float().mean()), float((p * chances).sum())
    assert found == pytest.approx(expected, abs=0.01)
    distance = float((p - q).abs().sum() / 2)
    assert expected >= (1 - distance) / (1 + distance) - 1e-6
    for token in p.topk(3).indices.tolist():
        share = float((drafted[target == token] == token).float().mean())
        assert share == pytest.approx(float(chances[token]), abs=0.03)


def test_nothing_waits_for_the_device() -> None:
    tree = grown_tree([torch.randn(3, 1, 9), torch.randn(3, 3, 9)], top_k=3, size=8)
    noise = PositionNoise(3, 9, CPU)
    with ForbidsHostWaits(), seeded(0):
        for drafts in (tree, DraftTree.chain(torch.zeros(3, 5, dtype=torch.long))):
            window = noise.window(range(3), [0, 2, 1], drafts.max_depth + 1)
            rows = torch.arange(3)[:, None]
            chosen = choose(torch.randn(3, drafts.size, 9), window[rows, drafts.depths])
            match_prefix(drafts.tokens, chosen) if drafts.is_chain else accept_chosen(drafts, chosen)


@pytest.mark.parametrize("seed", range(5))
def test_noise_without_a_seed_stays_with_its_position_and_is_drawn_for_many_at_once(seed: int) -> None:
    """A draft made ahead is chosen by the noise that verifies it, and no position has that of another."""
    generator = torch.Generator().manual_seed(seed)
    noise, dice, start = FreshNoise(7, CPU, generator), random.Random(seed), 0
    seen: dict[int, Tensor] = {}
    draws, before = 0, generator.get_state()
    while start < 200:
        count = dice.randint(1, 9)
        window = noise.window([0], [start], count)
        assert window.shape == (1, count, 7)
        for position, drawn in enumerate(window[0], start):
            assert torch.equal(seen.setdefault(position, drawn.clone()), drawn)
        draws, before = draws + (not torch.equal(before, generator.get_state())), generator.get_state()
        start += dice.randint(1, count)
    values = torch.stack([*seen.values()])
    assert len(values.unique()) == values.numel()
    assert draws <= 1 + 200 / 10
    assert stats.kstest(values.flatten().numpy(), "expon").pvalue > 1e-4
