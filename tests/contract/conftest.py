"""All that compiling needs, without the compiler."""

from __future__ import annotations

import pytest

from helpers import use_fixed_shapes_only


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here goes through all that compiling needs (fixed shapes, buckets, padding) but the compiler,
    which `test_acceleration` calls for every family. Buckets are small, so that texts outgrow them.
    """
    use_fixed_shapes_only(monkeypatch)
