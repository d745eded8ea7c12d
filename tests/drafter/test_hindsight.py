"""What a drafter that rested would have drafted is judged as its drafts are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from eagle31_hf.decoding.round import RoundBatch, RoundWrapper
from eagle31_hf.drafter.hindsight import MOST_JUDGED, FirstDrafts, Hindsight
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.sampling.logits_processing import DraftWarping
from helpers import (
    DEAR_DRAFTS,
    VOCABULARY,
    calibrated,
    drafter_of,
    left_padded,
    prompts_for,
    seeded,
    target_of,
    wrapped_rounds,
)

DRAFT_IDS = torch.tensor([3, 5, 6, 9, 11, 14])  # of a target vocabulary of 16

WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)]


def test_likeliest_tokens_are_counted() -> None:
    logits = torch.tensor([[[0.0, 3, 1, 2, 0, 0], [5.0, 0, 0, 4, 0, 0], [0.0, 0, 0, 0, 0, 9]]])
    tokens = torch.tensor([[5, 9, 15]])
    assert FirstDrafts().accepted(logits, tokens, DRAFT_IDS) == 1
    assert FirstDrafts(children=2).accepted(logits, tokens, DRAFT_IDS) == 2
    assert FirstDrafts().accepted(logits, torch.tensor([[1, 0, 5]]), None) == 3, "a vocabulary of its own"


@pytest.mark.parametrize("draft_ids", [DRAFT_IDS, None], ids=["reduced", "whole"])
@pytest.mark.parametrize("processors", [[], WARPERS], ids=["bare", "warped"])
def test_of_sampled_text_drafts_by_its_noise_are_counted(draft_ids: Tensor | None, processors: list) -> None:
    width = 16 if draft_ids is None else len(draft_ids)
    with seeded(0):
        logits, noise = 2 * torch.randn(1, 200, width), torch.empty(1, 200, 16).exponential_()
        tokens = torch.randint(0, 16, (1, 200))
    warping = DraftWarping(LogitsProcessorList(processors))
    scores = warping.of_nodes(logits)
    own = noise if draft_ids is None else noise[..., draft_ids]
    drafted = (scores.softmax(-1) / own).argmax(-1)
    drafted = drafted if draft_ids is None else draft_ids[drafted]
    right = int((drafted == tokens).sum())
    judged = FirstDrafts(1, warping.of_nodes, lambda count: noise[:, -count:])
    assert judged.accepted(logits, tokens, draft_ids) == right > 5


def positions(rows: int, count: int) -> tuple[Tensor, Tensor]:
    drafter = drafter_of("llama")
    width = len(drafter.binding.aux_layers) * drafter.config.target_hidden_size
    with seeded(0):
        return torch.randint(3, VOCABULARY, (rows, count)), torch.randn(rows, count, width)


def session(rows: int, block: int = 64) -> DraftSession:
    return DraftSession(drafter_of("llama"), batch_size=rows, capacity=256, block=block)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("count", [2, 9, MOST_JUDGED + 1, MOST_JUDGED + 20])
@torch.no_grad()
def test_one_look_back_says_what_drafts_one_by_one_would_have_said(rows: int, count: int) -> None:
    tokens, aux = positions(rows, count)
    one_by_one, later = session(rows), session(rows)
    judged, children, right = min(count - 1, MOST_JUDGED), 40, 0
    for place in range(count):
        if place >= count - judged:
            likeliest = one_by_one.root.logits[:, 0].topk(children).indices
            drafted = likeliest if one_by_one.draft_ids is None else one_by_one.draft_ids[likeliest]
            right += int((drafted == tokens[:, place, None]).sum())
        one_by_one.absorb(tokens[:, place : place + 1], aux[:, place : place + 1], [1] * rows)
        later.put_off(tokens[:, place : place + 1].tolist(), aux[:, place : place + 1])
    assert later.catch_up(first=FirstDrafts(children=children)) == Hindsight(rows * judged, right)
    assert rows * judged < 10 or 0 < right < rows * judged, "no figure that any code would get"
    assert later.cache.lengths == one_by_one.cache.lengths
    torch.testing.assert_close(later.root.logits, one_by_one.root.logits)
    torch.testing.assert_close(later.root.feedback, one_by_one.root.feedback)
    assert later.catch_up(first=FirstDrafts()) == Hindsight(), "nothing is left to be read"


@torch.no_grad()
def test_by_scores_that_are_no_numbers_nothing_is_judged() -> None:
    """So they are drafted with, which is noticed and said."""
    tokens, aux = positions(1, 9)
    broken = torch.full_like(aux, float("nan"))
    for first in (FirstDrafts(), FirstDrafts(1, lambda logits: logits, lambda count: torch.ones(1, count, VOCABULARY))):
        later = session(1)
        later.put_off(tokens.tolist(), broken)
        assert later.catch_up(first=first) == Hindsight()


def test_where_drafts_depend_on_more_than_scores_nothing_is_said() -> None:
    """Under a penalty a resting drafter is tried, not judged by scores that its drafts would not have gone by."""
    told = {"do_sample": True, "repetition_penalty": 1.3, "max_new_tokens": 70, "pad_token_id": 0}
    found: list[Hindsight] = []

    class Watching(RoundWrapper):
        def look_back(self, batch: RoundBatch) -> Hindsight:
            found.append(super().look_back(batch))
            return found[-1]

    inputs = left_padded(prompts_for("llama", 1, seed=5))
    with calibrated(drafter_of("llama"), DEAR_DRAFTS), wrapped_rounds(Watching), seeded(1):
        target_of("llama").generate(**inputs, **told, assistant_model=drafter_of("llama"))
        assert set(found) == {Hindsight()}
        found.clear()
        target_of("llama").generate(**inputs, **told | {"repetition_penalty": 1.0}, assistant_model=drafter_of("llama"))
    assert found
    assert all(each.positions > 0 for each in found)
