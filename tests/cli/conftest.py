"""Commands without a network."""

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """On a busy machine anything may take two seconds, and stderr would say so."""
    monkeypatch.setattr("eagle31_hf.cli.progress.QUIET_S", 600.0)
