"""A greedy `generate` call, a prompt for it, and what its drafter's stats say afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle31_hf import SpeculationStats
from helpers import GREEDY, drafter_of, left_padded, prompts_for, target_of


def greedy(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    return target_of(name).generate(**inputs, **GREEDY | kwargs)


def one(name: str = "llama") -> dict[str, Tensor]:
    return left_padded(prompts_for(name, 1))


def stats_of(name: str = "llama") -> SpeculationStats:
    stats = drafter_of(name).stats
    assert stats is not None
    return stats
