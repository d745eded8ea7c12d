"""What a `generate` call returns: transformers' own output, with the figures of the call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..stats import SpeculationStats


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `speculation_stats`."""

    speculation_stats: SpeculationStats | None = None


def with_stats(output: Any, stats: SpeculationStats) -> Any:
    """An output of transformers' own loops with the figures; bare ids stay as they are."""
    if isinstance(output, GenerateDecoderOnlyOutput):
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        return SpeculativeOutput(**values, speculation_stats=stats)
    return output
