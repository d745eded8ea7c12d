"""Memory that is given back at once."""

from __future__ import annotations

import logging
from unittest import mock

import pytest

from eagle31_hf.loop import survive


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> mock.Mock:
    """Without collecting garbage, which takes longer than a generation here: what is called instead."""
    caplog.set_level(logging.WARNING, "eagle31_hf")
    monkeypatch.setattr(survive, "give_back_memory", given_back := mock.Mock())
    return given_back
