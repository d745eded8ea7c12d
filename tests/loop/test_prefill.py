"""After a prompt the drafter has read every position with the token that follows it, however rows and chunks lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle31_hf.drafter.session import DraftSession, absorbed
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.loop.pair_caches import PairCaches
from eagle31_hf.loop.prefill import ChunkedPrefill, PrefillState
from helpers import drafter_of, random_prompts

FIRST = [[7], [11], [13]]
"""The token after each prompt."""


def read_in_chunks(texts: list[list[int]], first: list[list[int]], chunk: int) -> DraftSession:
    drafter = drafter_of("llama")
    binding = drafter.binding
    caches = PairCaches.make(drafter, DraftShape(depth=3), batch_size=len(texts), length=64, chunk=chunk)
    assert caches.drafter is not None
    reading = PrefillState(texts, unread=0, device=torch.device("cpu"))
    with binding.masked_attention():
        ChunkedPrefill(binding, caches.target, caches.drafter).read(reading, chunk)
    assert reading.last_aux is not None
    caches.drafter.absorb(*absorbed(first, reading.last_aux))
    return caches.drafter


def root_alone(text: list[int], first: list[int]) -> tuple[Tensor, Tensor]:
    """The drafter's logits and feedback after a text, of one stock forward and one pass."""
    drafter = drafter_of("llama")
    binding = drafter.binding
    ids = torch.tensor([text])
    with binding.capturing():
        binding.model(ids)
        aux = binding.take_aux()
    session = DraftSession(drafter, batch_size=1, capacity=64, block=64)
    following = [*text[1:], *first]
    session.absorb(torch.tensor([following]), aux[:, : len(following)], [len(following)])
    return session.root.logits[0], session.root.feedback[0]


@pytest.mark.parametrize("chunk", [64, 9, 4, 1])
@pytest.mark.parametrize("ended", [None, 1])
@torch.no_grad()
def test_every_position_is_paired_with_the_token_after_it(chunk: int, ended: int | None) -> None:
    """Prompts that end in different chunks, one of them of a single token; one row may have ended with its first."""
    texts = [random_prompts(1, seed=seed)[0][:length] for seed, length in ((1, 11), (2, 5), (3, 1))]
    first = [[] if row == ended else token for row, token in enumerate(FIRST)]
    session = read_in_chunks(texts, first, chunk)
    assert session.cache.lengths == [len(text) - (not new) for text, new in zip(texts, first, strict=True)]
    for row, (text, new) in enumerate(zip(texts, first, strict=True)):
        logits, feedback = root_alone(text, new)
        torch.testing.assert_close(session.root.logits[row], logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(session.root.feedback[row], feedback, atol=1e-4, rtol=1e-4)
