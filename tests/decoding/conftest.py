"""Memory that is given back at once."""

from __future__ import annotations

import logging

import pytest
import torch

from eagle31_hf.decoding import out_of_memory
from eagle31_hf.generation import stock_loop


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[torch.device]:
    """Without collecting garbage, which takes longer than a generation here. Returns where it would have been."""
    caplog.set_level(logging.WARNING, "eagle31_hf")
    calls: list[torch.device] = []
    for module in (out_of_memory, stock_loop):
        monkeypatch.setattr(module, "give_back_memory", calls.append)
    return calls
