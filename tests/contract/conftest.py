"""Graphs as on a card, without the card."""

from __future__ import annotations

import pytest

from eagle31_hf.cache import graph_sizes
from eagle31_hf.graphs import captured
from recorder import Recorder


@pytest.fixture(autouse=True)
def _captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here is captured: recorded over buffers that outlive each text, and replayed. Buffers are small,
    so that texts outgrow them. Graphs for a CPU are padded as well, which tests/graphs asks about.
    """
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    monkeypatch.setitem(captured.CAPTURES, "cpu", Recorder())
