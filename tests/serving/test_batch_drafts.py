"""A running batch drafts what pays for so many rows, and rests where nothing does; its texts are the target's own."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from batches import chosen

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.adaptive.guard import SHORTEST_REST
from eagle31_hf.decoding.calibration.calibration import Calibration, ContextSeconds
from eagle31_hf.decoding.draft_backoff import ROUNDS_IN_VAIN
from eagle31_hf.decoding.pair_history import PairHistory
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.drafter.hindsight import Hindsight
from eagle31_hf.serving.batch import TextBatch
from eagle31_hf.serving.batch_drafts import BatchDrafts
from eagle31_hf.serving.prompts import encode_chat
from eagle31_hf.serving.requests import Sampling, TextRequest
from eagle31_hf.serving.text import TextWriter
from eagle31_hf.serving.written_text import WrittenText
from helpers import CHEAP_DRAFTS, configured

DEAR_BY_ROWS = Calibration((ContextSeconds(64, ((1, 1.0), (8, 1.1), (64, 18.0)), 0.02, 0.02),), 0.02, 0.01)
"""One row verifies a chain for next to nothing, eight of them pay for every token."""


@contextmanager
def measured(calibration: Calibration | None):
    with mock.patch.object(PairHistory, "calibration", return_value=calibration):
        yield


def ids_of(pair, number: int) -> list[int]:
    return encode_chat(pair.tokenizer, CONVERSATIONS[number % len(CONVERSATIONS)][:1])


def start(pair, batch: TextBatch, prompt: list[int], new_tokens: int, sampling: Sampling) -> WrittenText:
    request = TextRequest(tuple(prompt), new_tokens, sampling, ignore_eos=True)
    writer = TextWriter(pair.tokenizer, request, frozenset())
    text = WrittenText(request, writer, chosen(request))
    batch.read(batch.begin(text))
    batch.join()
    return text


@pytest.fixture(scope="module")
def untrained(pair):
    drafter = Eagle31Drafter.from_pretrained(pair.drafter.name_or_path, target=pair.target)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    return drafter


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=0.8, seed=5)], ids=["greedy", "drawn"]
)
@torch.inference_mode()
@pytest.mark.thorough
def test_texts_that_come_and_go_while_the_drafter_rests_are_its_own(pair, untrained, sampling: Sampling) -> None:
    """With a drafter that is never right, rows joining, leaving and beginning as others did: as without any drafts."""
    lengths, texts = (90, 30, 60, 20, 50), {}
    for calibration, depth in ((CHEAP_DRAFTS, 5), (None, 1)):
        with measured(calibration), configured(untrained, num_assistant_tokens=depth):
            batch = TextBatch(untrained, max_rows=2, context=256, prefill_chunk=32)
            texts[calibration] = []
            for number, length in enumerate(lengths):
                while len(batch.texts) == 2:
                    batch.round()
                texts[calibration].append(start(pair, batch, ids_of(pair, number // 2), length, sampling))
            while batch.texts:
                batch.round()
        if calibration is not None:
            assert batch.stats.skipped_rounds > batch.stats.passes / 2
            assert any(text.usage.cached_tokens for text in texts[calibration]), "a row was begun with another's caches"
    assert [text.tokens for text in texts[CHEAP_DRAFTS]] == [text.tokens for text in texts[None]]


@torch.inference_mode()
def test_drafts_that_are_right_go_on(pair) -> None:
    with measured(CHEAP_DRAFTS), configured(pair.drafter, num_assistant_tokens=5):
        batch = TextBatch(pair.drafter, max_rows=2, context=256, prefill_chunk=64)
        for number in range(2):
            start(pair, batch, ids_of(pair, number), 60, Sampling(temperature=0))
        while batch.texts:
            batch.round()
    assert batch.stats.skipped_rounds == 0
    assert batch.stats.acceptance_length > 2


def drafted(drafts: BatchDrafts, rows: int, right: int, rounds: int) -> list[int]:
    """Depth of each round's drafts, where every row has so many of them right."""
    depths = []
    for _ in range(rounds):
        plan = drafts.next_draft(rows, context=64, remaining=200)
        if plan.looks_back:
            drafts.record_hindsight(Hindsight(8, 8.0 * (right > 0)))
            plan = drafts.next_draft(rows, context=64, remaining=200)
        depths.append(plan.shape.depth)
        drafts.record(plan, plan.shape.depth, [min(right, plan.shape.depth)] * rows)
    return depths


def test_many_rows_draft_less_than_one(pair) -> None:
    with measured(DEAR_BY_ROWS), configured(pair.drafter, num_assistant_tokens=7):
        drafts = BatchDrafts(pair.drafter)
        alone = drafted(drafts, 1, right=7, rounds=20)
        crowded = drafted(drafts, 8, right=1, rounds=40)
        again = drafted(drafts, 1, right=7, rounds=60)
    assert alone[-1] == 7
    assert max(crowded[10:]) <= 1
    assert 0 in crowded, "one token of each row does not pay for verifying two"
    assert again[-1] == 7, "what the crowd has shown is not held against a single text for ever"


@pytest.mark.parametrize(("calibration", "schedule"), [(None, "calibrated"), (CHEAP_DRAFTS, "constant")])
def test_without_costs_it_pauses_after_rounds_in_vain(pair, calibration: Calibration | None, schedule: str) -> None:
    fields = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": schedule}
    with measured(calibration), configured(pair.drafter, **fields):
        depths = drafted(BatchDrafts(pair.drafter), 3, right=0, rounds=ROUNDS_IN_VAIN + 4)
    assert depths == [4] * ROUNDS_IN_VAIN + [0] * 4


def test_a_text_that_joins_is_judged_soon(pair) -> None:
    with configured(pair.drafter, num_assistant_tokens=4):
        with measured(CHEAP_DRAFTS):
            drafts = BatchDrafts(pair.drafter)
        drafted(drafts, 2, right=0, rounds=120)  # in the middle of a long rest
        drafts.text_joins()
        assert max(drafted(drafts, 2, right=4, rounds=SHORTEST_REST + 2)) > 0
        with measured(None):
            drafts = BatchDrafts(pair.drafter)
        drafted(drafts, 2, right=0, rounds=ROUNDS_IN_VAIN)
        drafts.text_joins()
        assert drafted(drafts, 2, right=0, rounds=1) == [4]


def test_the_end_of_all_texts_cuts_a_draft(pair) -> None:
    with measured(CHEAP_DRAFTS), configured(pair.drafter, num_assistant_tokens=4):
        batch = TextBatch(pair.drafter, max_rows=2, context=256, prefill_chunk=64)
        texts = [start(pair, batch, ids_of(pair, number), 2 + number, Sampling(temperature=0)) for number in range(2)]
        with torch.inference_mode():
            batch.round()
        assert [text.usage.drafted for text in texts] == [2, 2], "the longer one gets its last token from the target"
        drafts = BatchDrafts(pair.drafter)
        plan = drafts.next_draft(2, context=64, remaining=1)
        assert plan.shape.depth == 0
        assert not plan.skips, "nothing could be drafted, which says nothing of the drafter"
