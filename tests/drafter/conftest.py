"""Folders of unpacked targets and drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_pairs import FAMILIES

from helpers import MODELS, random_target


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {"demo-target": MODELS / "demo-target"}
    for name, config in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        random_target(config).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")
