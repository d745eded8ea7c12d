"""As much of `torch.cuda` as capturing asks, without a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Let `torch.cuda` be one."""
    made = Card()
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.make_pool)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocations, raising=False)
    return made
