"""Graphs' shapes without a compiler."""

from __future__ import annotations

import pytest

from helpers import use_fixed_shapes_only


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
