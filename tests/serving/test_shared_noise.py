"""Texts without a seed share one call for their noise; each position of each text has its own, which stays."""

from __future__ import annotations

import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from eagle31_hf.sampling.noise_size import KEPT_BEHIND
from eagle31_hf.serving.rows import SharedNoise

CPU = torch.device("cpu")
VOCABULARY = 9
MOST = 6


def shared(seed: int) -> SharedNoise:
    noise = SharedNoise(VOCABULARY, CPU)
    noise._generator.manual_seed(seed)
    noise.window(["first"], [0], MOST)  # rows of full length
    noise.window([f"others {number}" for number in range(4)], [0] * 4, 1)
    return noise


@pytest.mark.parametrize("seed", range(4))
def test_a_positions_noise_stays_and_is_nobody_elses(seed: int) -> None:
    """Texts come and go, advance by lot, and now and then look back."""
    noise, dice, seen = shared(seed), random.Random(seed), dict[tuple[str, int], Tensor]()
    places: dict[str, int] = {}
    for turn in range(200):
        if places and dice.random() < 0.1:
            places.pop(dice.choice([*places]))
        if len(places) < 4 and dice.random() < 0.5:
            places[f"text {turn}"] = 0
        texts, count = dice.sample([*places], len(places)), dice.randint(1, MOST)
        starts = [max(places[text] - dice.choice((0, 0, 0, KEPT_BEHIND)), 0) for text in texts]
        window = noise.window(texts, starts, count)
        assert window.shape == (len(texts), count, VOCABULARY)
        for text, start, row in zip(texts, starts, window, strict=True):
            for offset, each in enumerate(row):
                assert torch.equal(seen.setdefault((text, start + offset), each), each)
            places[text] = max(places[text], start + dice.randint(0, count))
    noises = torch.stack([*seen.values()])
    assert len(noises.unique(dim=0)) == len(noises) > 500
    assert stats.kstest(noises.double().flatten().numpy(), "expon").pvalue > 0.001


def test_a_jump_is_as_good_as_a_beginning() -> None:
    """Backwards beyond what is kept, and forwards past what was asked for."""
    noise = shared(0)
    ahead = noise.window(["text"], [500], 3).clone()
    assert torch.equal(noise.window(["text"], [501], 2)[:, :2], ahead[:, 1:])
    behind = noise.window(["text"], [3], 3)
    assert not torch.isin(behind, ahead).any()


def test_of_texts_that_have_gone_and_positions_far_behind_nothing_is_held() -> None:
    noise = shared(0)
    for number in range(50):
        noise.window([f"text {number}", "one that stays"], [0, number], 3)
    assert {text: len(held) for text, held in noise._held.items()} == {"text 49": 3, "one that stays": KEPT_BEHIND + 3}


def test_processes_do_not_draw_alike() -> None:
    one, other = SharedNoise(VOCABULARY, CPU), SharedNoise(VOCABULARY, CPU)
    before = torch.get_rng_state()
    assert not torch.equal(one.window(["text"], [0], 2), other.window(["text"], [0], 2))
    assert torch.equal(torch.get_rng_state(), before)
