"""Rounds of a known text in closed form are those of every draft that could have been drawn, weighed by its chance."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from eagle31_hf.sampling.expected_rounds import chance_kept, expected_visits

SIZE, DEPTH = 3, 3


def table(seed: int, sharpness: float) -> Tensor:
    """Distribution `(1 + SIZE, SIZE)` after the root and after each token."""
    dice = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(1 + SIZE, SIZE, generator=dice, dtype=torch.float64)).softmax(-1)


def along(distributions: Tensor, chain: tuple[int, ...]) -> Tensor:
    """`(K+1, SIZE)` after the root and each token of a chain."""
    return distributions[[0, *(1 + token for token in chain)]]


def kept_by_block_verification(p: Tensor, q: Tensor, text: tuple[int, ...]) -> list[float]:
    """Chance that the first k drafts are kept and are the text's, by the rule's definition: every chain is judged."""
    chances = [0.0] * (len(text) + 1)
    for chain in itertools.product(range(SIZE), repeat=len(text)):
        target, drafted = along(p, chain), along(q, chain)
        reached, holds, drawn = 1.0, [], 1.0
        for depth, token in enumerate(chain, start=1):
            drawn *= drafted[depth - 1, token].item()
            reached = min(1.0, reached * (target[depth - 1, token] / drafted[depth - 1, token]).item())
            overlap = torch.minimum(reached * target[depth], drafted[depth]).sum().item() if depth < len(text) else 0.0
            holds.append((reached - overlap) / (1 - overlap) if overlap < 1 else 1.0)
        for k in range(len(text) + 1):
            if chain[:k] == text[:k]:  # kept down to the deepest that holds
                none_deeper = math.prod(1 - chance for chance in holds[max(0, k - 1) :])
                chances[k] += drawn * (1 - none_deeper if k else 1.0)
    return chances


@pytest.mark.parametrize("sharpness", [0.7, 2.0])
def test_the_chance_to_keep_a_texts_tokens_is_that_of_all_chains(sharpness: float) -> None:
    p, q = table(0, sharpness), table(1, sharpness)
    for text in itertools.product(range(SIZE), repeat=DEPTH):
        tokens = torch.tensor(text)[:, None]
        log_p, log_q = (along(d, text)[:-1].gather(1, tokens).T.log() for d in (p, q))
        written = log_p.cumsum(1).exp()  # chance that the target writes so
        found = (chance_kept(log_q, log_p) * written)[0].tolist()
        assert found == pytest.approx(kept_by_block_verification(p, q, text)[1:], abs=1e-12)


def test_visits_are_those_of_every_way_through_the_text() -> None:
    kept = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumprod(1)

    def rounds_from(position: int) -> float:
        """By recursion from the front: `R(t) = 1 + sum_k P_t(k) R(t + k + 1)`."""
        if position >= len(kept):
            return 0.0
        chances = [1.0, *kept[position].tolist(), 0.0]
        return 1 + sum((chances[k] - chances[k + 1]) * rounds_from(position + k + 1) for k in range(4))

    assert expected_visits(kept).sum().item() == pytest.approx(rounds_from(0))
    assert expected_visits(torch.ones(5, 2, dtype=torch.float64)).tolist() == [1, 0, 0, 1, 0]
    assert expected_visits(torch.zeros(4, 2, dtype=torch.float64)).tolist() == [1, 1, 1, 1]


def test_tokens_that_cannot_be_drafted_end_a_chain_and_rounding_does_not() -> None:
    nothing = float("-inf")
    log_q = torch.tensor([[-1.0, nothing, -1.0], [-1.0, nothing, -1.0]])
    log_p = torch.tensor([[-1.0, -2.0, -1.0], [nothing, nothing, -1.0]])
    assert chance_kept(log_q, log_p).tolist() == [[1, 0, 0], [1, 0, 0]]
