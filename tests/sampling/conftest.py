"""Both ways to draw."""

from __future__ import annotations

import pytest

from eagle31_hf.sampling import draw as drawing


@pytest.fixture(params=["whole", "by blocks"])
def way_to_draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are summed up in one go, or blocks of two of them first."""
    if request.param == "by blocks":
        monkeypatch.setattr(drawing, "DRAWN_BY_BLOCKS", 0)
        monkeypatch.setattr(drawing, "BLOCK", 2)
