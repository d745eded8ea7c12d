"""The embedded target, its tokenizer, and a fresh drafter for it."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path
from helpers import random_drafter, target_of


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(target_path())


@pytest.fixture(scope="module")
def target():
    return target_of("demo-target")


@pytest.fixture(scope="module")
def drafter(target) -> Eagle31Drafter:
    return random_drafter(target, draft_vocab_size=64)
