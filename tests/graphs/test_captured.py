"""A step that cannot be captured leaves stream and allocator as they were. The device is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.graphs.captured import CapturesOnCuda, ForbidsHostWaits, HostWaitError
from streams import Card, Stream, stand_in


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return stand_in(monkeypatch)


def failing_at(card: Card, call: int) -> Callable[[], Sequence[Tensor]]:
    """A step whose `call`-th run breaks the capture it is in."""
    calls = []

    def run() -> Sequence[Tensor]:
        calls.append(card.current.name)
        if len(calls) == call:
            card.broken = card.allocating
            raise RuntimeError("operation not permitted when stream is capturing")
        return [torch.zeros(1)]

    return run


@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_capture_leaves_everything_as_it_was(call: int, card: Card) -> None:
    capture = CapturesOnCuda(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(failing_at(card, call))
    assert card.current is card.default
    assert not card.allocating
    capture(lambda: [torch.zeros(1)])  # the next one is recorded


def test_all_captures_share_a_stream_and_a_pool(card: Card) -> None:
    capture = CapturesOnCuda(torch.device("cuda", 0))
    for _ in range(6):
        capture(lambda: [torch.zeros(1)])
    assert (card.streams, card.pools) == (1, 1)


def test_a_step_that_waits_is_not_captured(card: Card) -> None:
    runs = []

    def run() -> Sequence[Tensor]:
        runs.append(card.allocating)
        return [torch.zeros(1) * torch.ones(1).item()]

    with pytest.raises(HostWaitError, match="_local_scalar_dense"):
        CapturesOnCuda(torch.device("cuda", 0))(run)
    assert runs == [False], "no capture was begun"
    assert card.current is card.default


def test_replays_of_other_streams_take_turns(card: Card) -> None:
    recordings = [CapturesOnCuda(torch.device("cuda", 0))] * 2
    first, second = (capture(lambda: [torch.zeros(1)]) for capture in recordings)
    first.replay()
    other = Stream("other")
    with card.stream(other):
        second.replay()
        second.replay()
    assert other.waited_for == ["default"]
    first.replay()
    assert card.default.waited_for[-1] == "other"


VALUES = torch.arange(4.0)
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: VALUES[1].item(),
    "truth": lambda: bool(VALUES.sum() > 1),
    "nonzero": lambda: VALUES.nonzero(),
    "where": lambda: torch.where(VALUES > 1),
    "mask": lambda: VALUES[VALUES > 1],
    "written by mask": lambda: VALUES.clone().index_put_((VALUES > 1,), torch.tensor(0.0)),
    "masked select": lambda: VALUES.masked_select(VALUES > 1),
    "unique": lambda: VALUES.unique(),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "copied to another device": lambda: VALUES.to("meta"),
}
NO_WAITS: dict[str, Callable[[], Any]] = {
    "where": lambda: torch.where(VALUES > 1, VALUES, 0),
    "rows by number": lambda: VALUES[torch.tensor([1, 2])],
    "filled by mask": lambda: VALUES.masked_fill(VALUES > 1, 0),
    "cast": lambda: VALUES.to(torch.float64),
    "copied without waiting": lambda: VALUES.to("meta", non_blocking=True),
    "copied in place": lambda: VALUES.clone().copy_(VALUES),
}


@pytest.mark.parametrize("run", WAITS.values(), ids=WAITS)
def test_what_waits_is_noticed(run: Callable[[], Any]) -> None:
    with pytest.raises(HostWaitError), ForbidsHostWaits():
        run()


@pytest.mark.parametrize("run", NO_WAITS.values(), ids=NO_WAITS)
def test_what_does_not_wait_is_computed(run: Callable[[], Any]) -> None:
    with ForbidsHostWaits():
        assert run() is not None
