"""The embedded pair in float32, and a server around it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path
from loopback import LoadedPair, Served, serving


@pytest.fixture(scope="session")
def pair() -> LoadedPair:
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval()
    drafter = Eagle31Drafter.from_pretrained(drafter_path(), target=target)
    return LoadedPair(target, drafter, AutoTokenizer.from_pretrained(target_path()))


@pytest.fixture(scope="session")
def served(pair: LoadedPair) -> Iterator[Served]:
    """One server for all tests that leave it as it was."""
    with serving(pair) as made:
        yield made


@pytest.fixture(scope="session")
def client(served: Served) -> openai.OpenAI:
    return served.client()
