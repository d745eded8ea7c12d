"""The embedded target, its tokenizer, and a fresh drafter for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(target_path())


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(target) -> Eagle31Drafter:
    torch.manual_seed(0)
    return Eagle31Drafter.from_target(target, draft_vocab_size=64)
