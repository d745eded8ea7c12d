"""Memory that is given back at once."""

from __future__ import annotations

import logging

import pytest
import torch

from eagle31_hf.loop import survive


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[torch.device]:
    """Without collecting garbage, which takes longer than a generation here. Returns where it would have been."""
    caplog.set_level(logging.WARNING, "eagle31_hf")
    calls: list[torch.device] = []
    monkeypatch.setattr(survive, "give_back_memory", calls.append)
    return calls
