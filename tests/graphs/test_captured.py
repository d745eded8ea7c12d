"""A step that cannot be captured leaves stream and allocator as they were, and its text goes on without graphs.

The device is a stand-in: streams and graphs are counted; steps and texts are real, and lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle31_hf.graphs import captured
from eagle31_hf.graphs.captured import CapturesOnCuda, ForbidsHostWaits, HostWaitError
from eagle31_hf.loop import kept_graphs
from helpers import GROUPED, assert_same_text, left_padded, random_drafter, random_prompts, random_target


class Stream:
    def __init__(self, name: str):
        self.name = name
        self.waited_for: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.name)


class Card:
    """As much of `torch.cuda` as capturing uses, with the fault that torch had before 2.13."""

    def __init__(self) -> None:
        self.default = self.current = Stream("default")
        self.streams = self.pools = 0
        self.allocating = False  # into a capture's pool
        self.broken = False  # by what ran inside a capture
        self.replays: list[str] = []

    def make_stream(self, *_: Any) -> Stream:
        self.streams += 1
        return Stream(f"side {self.streams}")

    def make_pool(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end_allocations(self, *_: Any) -> None:
        if not self.allocating:
            raise RuntimeError("no such pool")
        self.allocating = False

    def graph(self) -> Graph:
        return Graph(self)


class Graph:
    def __init__(self, card: Card):
        self.card = card

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads use the device meanwhile"
        assert not self.card.allocating, "one capture at a time"
        self.card.allocating = True

    def capture_end(self) -> None:
        if self.card.broken:
            self.card.broken = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.card.allocating = False

    def replay(self) -> None:
        self.card.replays.append(self.card.current.name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Let `torch.cuda` be one."""
    made = Card()
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.make_pool)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocations, raising=False)
    return made


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


class Asks(nn.Module):
    """A product that asks something before it is computed."""

    def __init__(self, product: nn.Module, question: Callable[[Tensor], object]):
        super().__init__()
        self.product, self.question = product, question

    def forward(self, states: Tensor) -> Tensor:
        self.question(states)
        return self.product(states)


def two_layers(**more: Any) -> Any:
    return random_target(LlamaConfig(**GROUPED | {"num_hidden_layers": 2, **more}))


def asking(question: Callable[[Tensor], object]) -> Any:
    target = two_layers()
    layer = target.model.layers[1].mlp
    layer.up_proj = Asks(layer.up_proj, question)
    return target


def that_breaks_a_capture(card: Card) -> Any:
    def question(_states: Tensor) -> None:
        if card.allocating:
            card.broken = True
            raise RuntimeError("operation not permitted when stream is capturing\nat line 7")

    return asking(question)


CANNOT: dict[str, tuple[Callable[[Card], Any], str]] = {
    "a number that the host reads": (lambda _card: asking(lambda states: states.abs().max().item()), "waits for"),
    "outliers, as LLM.int8 takes them out": (
        lambda _card: asking(lambda states: (states.abs() > 6.0).any(0).nonzero()), "nonzero waits for",
    ),
    "dynamic rope, which looks at the largest position of each forward": (
        lambda _card: two_layers(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "waits for",
    ),
    "a call that captures forbid": (that_breaks_a_capture, "not permitted when stream is capturing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CANNOT)
def test_a_text_goes_on_without_graphs(
    kind: str, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(captured.CAPTURES, "cpu", CapturesOnCuda(torch.device("cpu")))
    monkeypatch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 10)
    make, why = CANNOT[kind]
    target = make(card)
    drafter = random_drafter(target, aux_layers=[0, 1, 2])
    for seed in range(2):
        inputs = left_padded(random_prompts(1, seed=seed))
        assert_same_text(target, drafter, inputs, max_new_tokens=40, settings={"num_assistant_tokens": 3})
        assert drafter.stats.drafted > 0
    (reason,) = drafter.stats.fallbacks
    assert why in reason
    assert "\n" not in reason
    assert caplog.text.count("capturing failed") == 1, "said once"
    assert card.current is card.default
    assert not card.allocating, "or memory could not be given back, nor its end be noticed"
