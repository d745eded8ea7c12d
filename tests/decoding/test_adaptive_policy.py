"""Whatever a policy decides, the text is the target's own; and what the schedules decide reaches the drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.adaptive_policy import AdaptivePolicy
from eagle31_hf.decoding.calibration.calibration import Calibration
from eagle31_hf.decoding.draft_backoff import DraftBackoff
from eagle31_hf.decoding.round import RoundBatch, RoundWrapper
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.drafting.lookup import NOTHING
from eagle31_hf.drafting.plan import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.generation import own
from eagle31_hf.generation_config import LONGEST_CHAIN
from eagle31_hf.trees.draft_tree import DraftTree
from helpers import (
    CHEAP_DRAFTS,
    DEAR_DRAFTS,
    calibrated,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    seeded,
    switching_policies,
    target_of,
    use_fixed_shapes_only,
    wrapped_rounds,
)
from matrix import matrix, pairwise

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"draft_top_k": 2, "draft_tree_size": 15},
}
STEERED = ("calibrated", "pid", "heuristic")
NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


def write(rows: int, name: str = "llama", **settings: Any) -> Tensor:
    inputs = left_padded(prompts_for(name, rows, seed=5))
    told = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "assistant_model": drafter_of(name)}
    return target_of(name).generate(**inputs, **told | settings)


@cache
def plain_text(rows: int, name: str = "llama") -> Tensor:
    return write(rows, name, assistant_model=None)


def stats_of(name: str = "llama"):
    stats = drafter_of(name).stats
    assert stats is not None
    assert stats.loop == "own"
    return stats


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "rows", "acceleration"),
    matrix(["llama", "gemma3"], [*SHAPES], (1, 3), ("eager", "compile")),  # the third row ends first
)
@pytest.mark.thorough(every=6)
def test_switching_in_every_round_writes_the_plain_text(name: str, shape: str, rows: int, acceleration: str) -> None:
    plain = plain_text(rows, name)
    length = plain.shape[1] - NEW_TOKENS
    fields = SHAPES[shape] | {"num_assistant_tokens": 4, "acceleration": acceleration, "speculation_loop": "own"}
    with configured(drafter_of(name), **fields), switching_policies() as made:
        for seed in range(3):
            with oracle_drafts(plain, length, seed):
                assert torch.equal(write(rows, name), plain)
    assert set.union(*(policy.kinds for policy in made)) == {"none", "cut", "whole", "chain", "given"}
    assert stats_of(name).fallbacks == []


COSTS = {"cheap": CHEAP_DRAFTS, "dear": DEAR_DRAFTS}


@pytest.mark.parametrize(
    ("costs", "shape", "schedule", "rows", "acceleration"),
    pairwise([*COSTS], ("chain", "tree"), STEERED, (1, 3), ("eager", "compile")),
)
@pytest.mark.thorough(every=2)
def test_every_schedule_writes_the_plain_text(
    costs: str, shape: str, schedule: str, rows: int, acceleration: str
) -> None:
    plain = plain_text(rows)
    length = plain.shape[1] - NEW_TOKENS
    fields = SHAPES[shape] | {"num_assistant_tokens_schedule": schedule, "acceleration": acceleration}
    with configured(drafter_of("llama"), **fields) as eagle, calibrated(eagle, COSTS[costs]):
        with oracle_drafts(plain, length):
            assert torch.equal(write(rows), plain)
        assert torch.equal(write(rows), plain), "a drafter that is never right"
        if costs == "dear":
            assert stats_of().skipped_rounds > 0


@pytest.mark.parametrize("costs", [*COSTS])
@pytest.mark.parametrize("schedule", STEERED)
@pytest.mark.parametrize("acceleration", ["eager", "compile"])
@pytest.mark.thorough(every=6)
def test_a_seed_writes_the_same_text_twice(schedule: str, acceleration: str, costs: str) -> None:
    """Dear drafts rest, and their drafter is judged by what it would have drafted meanwhile."""
    fields = {"num_assistant_tokens_schedule": schedule, "acceleration": acceleration}
    with configured(drafter_of("llama"), **fields) as eagle, calibrated(eagle, COSTS[costs]):
        texts = []
        for seed in (1, 2, 1):
            with seeded(seed):
                texts.append(write(1, do_sample=True))
            write(1)  # a greedy text between them teaches its successors, and no drawn one
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])


# --- what is decided --------------------------------------------------------------------------------------------------


def depths_of(right: int | None, rows: int = 1, **fields: Any) -> list[int]:
    """Depth of each round's draft where so many tokens are always right."""
    plain = plain_text(rows)
    seen: list[int] = []

    class Watching(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            tree = super().draft(batch)
            seen.append(tree.max_depth)
            return tree

    with (
        configured(drafter_of("llama"), **fields) as eagle,
        calibrated(eagle),
        oracle_drafts(plain, plain.shape[1] - NEW_TOKENS, right=right),
        wrapped_rounds(Watching),
    ):
        assert torch.equal(write(rows), plain)
    return seen


@pytest.mark.parametrize("schedule", STEERED)
def test_lengths_follow_what_is_accepted(schedule: str) -> None:
    fields = {"num_assistant_tokens_schedule": schedule, "draft_length_bounds": (1, 8)}
    long, short = depths_of(8, **fields), depths_of(1, **fields)
    assert max(long) >= 6
    drafted = [depth for depth in short[4:-2] if depth]
    assert not drafted or min(drafted) < 6
    assert max(long + short) <= 8


def test_lengths_keep_to_their_bounds() -> None:
    for schedule in STEERED:
        fields = {"num_assistant_tokens_schedule": schedule, "draft_length_bounds": (3, 4)}
        for right in (0, 4):
            assert set(depths_of(right, **fields)[:-4]) <= {0, 3, 4}, "the text's end may cut a draft"


def test_graphs_are_made_for_few_lengths() -> None:
    fields = {"num_assistant_tokens_schedule": "pid", "acceleration": "compile", "num_assistant_tokens": 7}
    assert set(depths_of(None, **fields)[:-7]) <= {0, 1, 4, 7}
    fields["num_assistant_tokens_schedule"] = "calibrated"
    assert set(depths_of(1, **fields)[:-7]) <= {0, 7}, "on a CPU, where a graph takes minutes"


def test_what_changes_is_told_with_its_reason() -> None:
    fields = {"num_assistant_tokens_schedule": "calibrated", "num_assistant_tokens": 5}
    with configured(drafter_of("llama"), **fields) as eagle, calibrated(eagle, DEAR_DRAFTS):
        write(1)
        events = stats_of().events
        assert events[0].what == "rest"
        assert "accepted" in events[0].why
        assert stats_of().to_dict()["events"][0]["what"] == "rest"
        write(1)
        assert stats_of().events[0].why.startswith("as in earlier texts"), "experience outlives a call"


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("costs", [CHEAP_DRAFTS, DEAR_DRAFTS], ids=["cheap", "dear"])
@pytest.mark.thorough(every=2)
def test_a_random_drafter_writes_at_plain_speed_by_counted_costs(
    costs: Calibration, looks_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default's own rounds at what a calibration says they take: 0.97 of plain decoding at least."""
    table, spent = costs.costs(64).rounds(LONGEST_CHAIN), []

    class Counting(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            tree = super().draft(batch)
            is_given = batch.plan is not None and batch.plan.tokens is not None
            spent.append((table.lookup_s if is_given else table.speculative_s)[tree.max_depth])
            return tree

    if not looks_up:
        monkeypatch.setattr(AdaptivePolicy, "_look_up", lambda *_: NOTHING)
    with calibrated(drafter_of("llama"), costs), wrapped_rounds(Counting):
        for _ in range(2):  # what the first text has taught is known to the second
            write(1, max_new_tokens=200, eos_token_id=None)
    written = 2 * 200 - 2  # a prompt's first token takes no round
    assert written * table.plain_s >= 0.97 * sum(spent)


def test_a_text_that_repeats_itself_is_drafted_from() -> None:
    """The drafter is never right here; the target, told to write what it wrote before, is foretold by its prompt."""
    once = plain_text(1)[0].tolist()
    inputs = {"input_ids": torch.tensor([once + once[:12]])}
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target_of("llama").generate(**inputs, **settings)
    given: list[DraftPlan] = []

    class Watching(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            if batch.plan is not None and batch.plan.tokens is not None:
                given.append(batch.plan)
            return super().draft(batch)

    fields = {"num_assistant_tokens_schedule": "calibrated", "num_assistant_tokens": 5}
    with configured(drafter_of("llama"), **fields) as eagle, calibrated(eagle), wrapped_rounds(Watching):
        text = target_of("llama").generate(**inputs, **settings, assistant_model=eagle)
    assert torch.equal(text, plain)
    assert given
    assert next(event.why for event in stats_of().events if event.what == "source").startswith("prompt lookup")


def test_uncalibrated_drafts_are_those_of_before() -> None:
    seen: list[Any] = []
    choose = own.choose_policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "choose_policy", lambda *told: seen.append(choose(*told)) or seen[-1])
        for schedule in ("constant", "calibrated", "pid", "heuristic"):
            with configured(drafter_of("llama"), num_assistant_tokens_schedule=schedule):
                write(1)
    assert [type(policy) for policy in seen] == [DraftBackoff, DraftBackoff, AdaptivePolicy, AdaptivePolicy]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"draft_length_bounds": (0, 4)}, "wanted shortest and longest"),
        ({"draft_length_bounds": (5, 4)}, "wanted shortest and longest"),
        ({"draft_length_bounds": (1, 2, 3)}, "wanted shortest and longest"),
        ({"draft_length_bounds": (1.0, 4)}, "wanted shortest and longest"),
        ({"draft_length_bounds": (1, 4), "num_assistant_tokens": 6}, "within its bounds"),
        ({"draft_length_bounds": (1, 4), "num_assistant_tokens_schedule": "constant"}, "has one length"),
    ],
)
def test_impossible_bounds(fields: dict[str, Any], told: str) -> None:
    fields = {"num_assistant_tokens_schedule": "pid"} | fields
    with configured(drafter_of("llama"), **fields), pytest.raises(ConfigurationError, match=told):
        write(1)


# --- a drafter that is broken, and one that rests ---------------------------------------------------------------------


@contextmanager
def broken_from(eagle: Eagle31Drafter, call: int) -> Iterator[None]:
    """From its n-th call on the drafter's head gives NaN."""
    head, calls = eagle.draft_logits, itertools.count(1)

    def logits(hidden: Tensor) -> Tensor:
        sound = head(hidden)
        return sound if next(calls) < call else torch.full_like(sound, float("nan"))

    with mock.patch.object(eagle, "draft_logits", logits):
        yield


@pytest.mark.contract
@pytest.mark.parametrize("call", [1, 12])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thorough(every=2)
def test_a_drafter_of_nan_is_done_without(shape: str, call: int, caplog: pytest.LogCaptureFixture) -> None:
    with configured(drafter_of("llama"), num_assistant_tokens=3, **SHAPES[shape]) as eagle:
        for count in (1, 3):
            with broken_from(eagle, call):
                assert torch.equal(write(count), plain_text(count))
            assert eagle.stats.events[-1].what == "stop"
            assert sum(eagle.stats.drafted_at[:1]) < count * NEW_TOKENS / 2, "the rest was written without it"
            for top_k in (0, 7):  # two ways to draw
                with broken_from(eagle, call), seeded(3):
                    write(count, do_sample=True, top_k=top_k)
            assert eagle.stats.events[-1].what == "stop"
            assert eagle.stats.new_tokens == count * NEW_TOKENS
    assert "NaN" in caplog.text


def test_graphs_of_nan_are_done_without() -> None:
    for sampled, top_k in ((False, 0), (True, 0), (True, 7)):
        with configured(drafter_of("llama"), num_assistant_tokens=3, acceleration="compile") as eagle:
            with broken_from(eagle, 12), seeded(3):
                text = write(1, do_sample=sampled, top_k=top_k)
            assert eagle.stats.events[-1].what == "stop"
        assert sampled or torch.equal(text, plain_text(1))


@pytest.mark.parametrize("acceleration", ["eager", "compile"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thorough(every=2)
def test_what_a_rest_passed_over_is_read_at_once(rows: int, acceleration: str) -> None:
    """The drafter then drafts what it would have drafted without a rest."""
    drafts: dict[bool, list[list[int]]] = {}
    reads: list[int] = []

    class RestsTwelveRounds(DraftPolicy):
        def __init__(self) -> None:
            self.rounds = 0

        def next_draft(self, state: RoundState) -> DraftPlan:
            return DraftPlan.skip() if self.rounds < 12 else DraftPlan(state.largest)

        def record(self, stats: RoundStats) -> None:
            self.rounds += 1

    class Watching(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            if reads_on and self.caches.drafter is not None:
                self.caches.drafter.catch_up()
            tree = super().draft(batch)
            if tree.size > 1:
                drafts[reads_on].append(tree.tokens.flatten().tolist())
            return tree

    for reads_on in (True, False):
        drafts[reads_on] = []
        reads.clear()
        with (
            configured(drafter_of("llama"), num_assistant_tokens=3, acceleration=acceleration),
            mock.patch.object(own, "choose_policy", side_effect=lambda *_: RestsTwelveRounds()),
            mock.patch.object(DraftSession, "_absorb", counting(DraftSession._absorb, reads)),
            wrapped_rounds(Watching),
        ):
            write(rows)
    assert max(reads[1:]) >= 12, "all of the rest together; the first is the prompt"
    assert drafts[True] == drafts[False]


def counting(read: Callable[..., Any], widths: list[int]) -> Callable[..., Any]:
    """What reads positions of a session, and how many each time."""

    def counted(self: DraftSession, tokens: Tensor, *rest: Any, **told: Any) -> Any:
        widths.append(tokens.shape[1])
        return read(self, tokens, *rest, **told)

    return counted
