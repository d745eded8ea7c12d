"""Folders of unpacked targets and drafters."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from packed_pairs import FAMILIES
from torch import nn

from helpers import MODELS, random_target, target_of


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of unpacked targets, and of the demo target."""
    folders = {"demo-target": MODELS / "demo-target", "demo-target, untied": tmp_path_factory.mktemp("untied")}
    demo = copy.deepcopy(target_of("demo-target"))
    demo.config.tie_word_embeddings = False
    demo.lm_head.weight = nn.Parameter(demo.lm_head.weight.detach().clone())
    demo.save_pretrained(folders["demo-target, untied"])
    for name, config in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        random_target(config).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")
