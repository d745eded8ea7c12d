"""Processors and criteria that draw random numbers, or return other scores than they were given: plain from the start.

None is asked twice what it has answered, and torch's generators go on as without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.sampling import callers_code
from helpers import configured, drafter_of, left_padded, oracle_drafts, prompts_for, seeded, target_of
from matrix import pairwise

NEW_TOKENS = 18


class Jitter(hf.LogitsProcessor):
    """Draws from its `first` call on, and is shown one more token each time."""

    def __init__(self, first: int = 1):
        self.first, self.calls, self.last = first, 0, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.last in (0, input_ids.shape[1] - 1), "not the next prefix"
        self.last = input_ids.shape[1]
        self.calls += 1
        return scores + 3 * torch.randn_like(scores) if self.calls >= self.first else scores


class Counting(hf.LogitsProcessor):
    """Likes a token for each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_add(1, torch.tensor([self.calls * 5 % 96]), torch.full((len(scores), 1), 2.0))


class Luck(hf.StoppingCriteria):
    """Draws from its `first` call on."""

    def __init__(self, first: int = 1):
        self.first, self.calls = first, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        ends = self.calls >= self.first and bool(torch.rand(()) < 0.1)
        return torch.full((len(input_ids),), ends)


class Other(hf.LogitsProcessor):
    """Returns something else from its `first` call on."""

    def __init__(self, change: Callable[[Tensor], Any], first: int = 1):
        self.change, self.first, self.calls = change, first, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls += 1
        return self.change(scores) if self.calls >= self.first else scores


def allowing(first: int) -> Callable[[int, Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn` that draws which tokens it allows, from a row's `first` call on."""
    calls: dict[int, int] = {}

    def function(row: int, ids: Tensor) -> list[int]:
        calls[row] = calls.get(row, 0) + 1
        return torch.randperm(90)[:40].tolist() if calls[row] >= first else list(range(2, 96, 2))

    return function


FIRST = (1, 2, 7)
CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "processor": lambda first: {"logits_processor": [Jitter(first)]},
    "behind one that counts": lambda first: {"logits_processor": [Counting(), Jitter(first)]},
    "before one that counts": lambda first: {"logits_processor": [Jitter(first), Counting()]},
    "criterion": lambda first: {"stopping_criteria": [Luck(first)]},
    "criterion, a processor counts": lambda at: {"stopping_criteria": [Luck(at)], "logits_processor": [Counting()]},
    "both": lambda first: {"stopping_criteria": [Luck(first)], "logits_processor": [Jitter()]},
    "function": lambda first: {"prefix_allowed_tokens_fn": allowing(first)},
    "fewer columns": lambda first: {"logits_processor": [Other(lambda scores: scores[:, :90], first)]},
    "double": lambda first: {"logits_processor": [Other(lambda scores: scores.double() * 1.7, first)]},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 15}}


class Blocks(hf.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def write(inputs: dict[str, Tensor], seed: int, **kwargs: Any) -> tuple[Any, Tensor]:
    kwargs = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | kwargs
    with seeded(seed):
        return target_of("llama").generate(**inputs, **kwargs), torch.get_rng_state()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("case", "first", "shape", "do_sample", "eos"),
    pairwise([*CASES], FIRST, [*SHAPES], (False, True), (False, True)),
)
def test_one_text(case: str, first: int, shape: str, do_sample: bool, eos: bool) -> None:
    for seed in range(3):
        inputs = left_padded(prompts_for("llama", 1, seed=seed))
        how: dict[str, Any] = {"do_sample": do_sample, "output_scores": True, "return_dict_in_generate": True}
        how["eos_token_id"] = [17, 60, 61, 62] if eos else None
        plain, state = write(inputs, seed, **how, **CASES[case](first))
        blocks = Blocks()
        with (
            configured(drafter_of("llama"), num_assistant_tokens=4, **SHAPES[shape]) as drafter,
            oracle_drafts(plain.sequences, inputs["input_ids"].shape[1], right=4),
        ):
            ours, our_state = write(inputs, seed, **how, **CASES[case](first), streamer=blocks, assistant_model=drafter)
        stats = drafter.stats
        assert stats is not None
        if stats.fallbacks:  # a criterion drew behind drafts that a processor had been shown already
            assert case == "criterion, a processor counts"
            assert first > 1
            continue
        assert torch.equal(plain.sequences, ours.sequences), seed
        assert torch.equal(state, our_state)
        assert (blocks.tokens, blocks.ended) == (plain.sequences[0].tolist(), 1)
        assert len(plain.scores) == len(ours.scores) == stats.new_tokens
        for one, other in zip(plain.scores, ours.scores, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
        if stats.new_tokens >= max(first, 2):
            assert stats.loop == "plain"
            assert "draws" in stats.reason or "returns" in stats.reason


@pytest.mark.contract
@pytest.mark.parametrize(
    ("case", "rows", "do_sample"), pairwise(["processor", "criterion", "function"], (2, 3), (False, True))
)
def test_batches(case: str, rows: int, do_sample: bool) -> None:
    inputs = left_padded(prompts_for("llama", rows))
    plain, state = write(inputs, 3, do_sample=do_sample, **CASES[case](1))
    ours, our_state = write(inputs, 3, do_sample=do_sample, assistant_model=drafter_of("llama"), **CASES[case](1))
    assert torch.equal(plain, ours)
    assert torch.equal(state, our_state)
    stats = drafter_of("llama").stats
    assert stats is not None
    assert stats.loop == "plain"


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_batch_that_cannot_be_followed_any_more_says_so(do_sample: bool) -> None:
    """Rows of a batch are at unlike places once a text has begun."""
    inputs = left_padded(prompts_for("llama", 3))
    write(inputs, 3, do_sample=do_sample, assistant_model=drafter_of("llama"), **CASES["function"](4))
    stats = drafter_of("llama").stats
    assert stats is not None
    assert any("took random numbers" in why for why in stats.fallbacks)


def test_our_loop_asked_for_by_name_says_what_it_has_met() -> None:
    inputs = left_padded(prompts_for("llama", 1))
    with (
        configured(drafter_of("llama"), speculation_loop="own") as drafter,
        pytest.raises(UnsupportedGenerationError, match=r"speculation_loop='own'.*Jitter draws"),
    ):
        write(inputs, 3, assistant_model=drafter, **CASES["processor"](3))


def test_a_carried_cache_is_left_as_it_was_and_then_filled() -> None:
    inputs, caches = left_padded(prompts_for("llama", 1)), []
    for assistant in (None, drafter_of("llama")):
        cache = hf.DynamicCache(config=target_of("llama").config)
        kwargs = {"past_key_values": cache, "return_dict_in_generate": True, "do_sample": True}
        text, _ = write(inputs, 3, assistant_model=assistant, **kwargs, **CASES["processor"](5))
        caches.append((text.sequences, cache.layers[0].keys))
    (plain, keys), (ours, our_keys) = caches
    assert torch.equal(plain, ours)
    torch.testing.assert_close(keys, our_keys)


def test_the_generator_of_the_device_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a card's: what draws from either one is noticed."""
    dice, card = torch.Generator(), torch.device("cuda")
    states = {card: dice.get_state, torch.device("cpu"): torch.get_rng_state}
    monkeypatch.setattr(callers_code, "random_state", lambda device: states[device]())
    code = callers_code.CallersCode(1, 5, card)
    assert code.ask(5, lambda: 7).after is None
    assert not code.has_drawn
    for generator in (dice, torch.default_generator):
        with seeded(3):
            answer = code.ask(5, lambda generator=generator: torch.rand(1, generator=generator))
        assert answer.after is not None
        assert set(answer.after) == set(states)
    assert code.has_drawn
