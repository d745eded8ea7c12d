"""Stopping criteria and streamers of the caller's: they end texts and are shown tokens as in plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from helpers import configured, drafter_of, left_padded, oracle_drafts, prompts_for, seeded, target_of
from matrix import pairwise

NEW_TOKENS = 20


class ByRow(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 9 == 0


class FirstRow(ByRow):
    """As tutorials have it."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return any(int(input_ids[0, -1]) == stop for stop in range(3, 96, 7))


class AnyRow(ByRow):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), bool((input_ids[:, -1] % 9 == 0).any()))


class AllRows(ByRow):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return bool((input_ids[:, -1] % 2 == 0).all())


class Calls(ByRow):
    """A budget of steps."""

    def __init__(self) -> None:
        self.left = 9

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


class Clock(Calls):
    """Says when its time is over; each look at it takes a second."""

    now = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.now += 1.0
        return self.now > 6.5


class Ending(ByRow):
    """Ends rows by their text."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        texts = [" ".join(map(str, row)) for row in input_ids[:, -3:].tolist()]
        return torch.tensor(["7" in text and "1" in text for text in texts])


class LikeEos(hf.EosTokenCriteria):
    """Rows that it ends are padded, too."""

    def __init__(self) -> None:
        super().__init__(list(range(3, 96, 5)))


class Shorter(hf.MaxLengthCriteria):
    def __init__(self) -> None:
        super().__init__(max_length=30)


class Columns(hf.generation.streamers.BaseStreamer):
    """Keeps what it is given, as it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


CRITERIA: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (ByRow, FirstRow, AnyRow, AllRows, Calls, Clock, Ending, LikeEos, Shorter)
} | {"function": lambda: lambda input_ids, scores: bool(input_ids[0, -1] % 9 == 0)}  # fmt: skip


def write(inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | kwargs
    with seeded(5):
        text = target_of("llama").generate(**inputs, **kwargs)
        return text, torch.get_rng_state()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("kind", "rows", "do_sample", "streams"), pairwise([*CRITERIA], (1, 2, 3, 4), (False, True), (False, True))
)
def test_texts_end_as_in_plain_decoding(kind: str, rows: int, do_sample: bool, streams: bool) -> None:
    for seed in range(3):
        inputs = left_padded(prompts_for("llama", rows, seed=seed))
        free, _ = write(inputs, do_sample=do_sample)
        with (
            configured(drafter_of("llama"), num_assistant_tokens=4) as drafter,
            oracle_drafts(free, inputs["input_ids"].shape[1], right=4),
        ):
            texts, shown = [], []
            for assistant in (None, drafter):
                streamer = Columns()
                how: dict[str, Any] = {"do_sample": do_sample, "stopping_criteria": [CRITERIA[kind]()]}
                if streams:
                    how["streamer"] = streamer
                texts.append(write(inputs, assistant_model=assistant, **how))
                shown.append(streamer.calls)
        (plain, state), (ours, our_state) = texts
        assert torch.equal(plain, ours)
        assert torch.equal(state, our_state)
        assert drafter.stats is not None
        assert drafter.stats.loop == ("own" if rows == 1 else "plain")
        assert (kind in drafter.stats.reason) == (rows > 1 and kind != "function")
        if rows > 1:
            assert shown[0] == shown[1]


@pytest.mark.contract
@pytest.mark.parametrize(("rows", "do_sample"), list(itertools.product((2, 3), (False, True))))
def test_a_streamer_is_shown_a_batch_as_by_plain_decoding(rows: int, do_sample: bool) -> None:
    inputs, shown = left_padded(prompts_for("llama", rows)), []
    for assistant in (None, drafter_of("llama")):
        streamer = Columns()
        write(inputs, do_sample=do_sample, assistant_model=assistant, streamer=streamer)
        shown.append(streamer.calls)
    assert shown[0] == shown[1]
    assert shown[0][1][0] == (rows,)
    stats = drafter_of("llama").stats
    assert stats is not None
    assert "Columns" in stats.reason


@pytest.mark.contract
@pytest.mark.parametrize("rule", [LikeEos, lambda: hf.EosTokenCriteria([3, 8, 13, 18, 23, 28])])
def test_criteria_that_name_ends_leave_no_count_wrong(rule: Callable[[], Any]) -> None:
    """A row that has ended is padded, and pads are not counted as new tokens."""
    inputs = left_padded(prompts_for("llama", 3))
    text, _ = write(inputs, assistant_model=drafter_of("llama"), stopping_criteria=[rule()], do_sample=False)
    new, ends = text[:, inputs["input_ids"].shape[1] :].tolist(), rule().eos_token_id.tolist()
    written = sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new)
    stats = drafter_of("llama").stats
    assert stats is not None
    assert stats.new_tokens == written
