"""What fits on which card: the tables of docs/memory.md."""

from __future__ import annotations

from itertools import product
from typing import Any

from eagle31_hf.memory import MemoryPlan, plan_memory
from eagle31_hf.memory.known_targets import known_targets

CARDS = ("RTX 4090", "RTX A6000")
SCHEMES = ("bf16", "bnb-int8", "bnb-nf4-dq")


def home_lab_table(targets: dict[str, Any] | None = None) -> dict[str, dict[tuple[str, str], int]]:
    """What fits on which card, with a drafter and caches in full precision: by target, then by (card, scheme), tokens
    of the longest context; 0 where the target does not fit at all.

    Args:
        targets: name -> anything `plan_memory` takes as target; default `known_targets`.
    """
    targets = targets or {name: known.config for name, known in known_targets().items()}
    return {
        name: {pair: _longest_with_drafter(target, *pair) for pair in product(CARDS, SCHEMES)}
        for name, target in targets.items()
    }


def _longest_with_drafter(target: Any, card: str, scheme: str) -> int:
    plan = _plan(target, card, scheme)
    trained = plan.target.max_position_embeddings or plan.longest_context
    return min(plan.longest_context, trained)


CACHED = (
    ("Llama 3.1 8B", "bf16", "RTX 4090"),
    ("Llama 3.1 8B", "nf4", "RTX 4090"),
    ("Qwen2.5 14B", "int8", "RTX 4090"),
    ("Gemma 3 27B", "nf4", "RTX 4090"),
    ("Qwen3 32B", "nf4", "RTX 4090"),
    ("Qwen3 32B", "nf4", "RTX A6000"),
)
"""Target, weights and card."""


def cache_table() -> list[tuple[int, int]]:
    """Tokens of the longest context for each of `CACHED`, by caches in full precision and in 8 bits, whatever the
    target was trained for."""
    schemes = {"bf16": "bf16", "int8": "bnb-int8", "nf4": "bnb-nf4-dq"}
    plans = [
        [_plan(known_targets()[target].config, card, schemes[weights], cache) for cache in ("full", "int8")]
        for target, weights, card in CACHED
    ]
    return [(full.longest_context, packed.longest_context) for full, packed in plans]


def _plan(target: Any, card: str, scheme: str, cache_type: str = "full") -> MemoryPlan:
    return plan_memory(
        target, quantization=scheme, card=card, context=2048, draft_tokens=6, prefill_chunk=1024, cache_type=cache_type
    )
