"""The table of docs/memory.md: what fits on which card."""

from __future__ import annotations

from itertools import product
from typing import Any

from eagle31_hf.memory import plan_memory
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
    plan = plan_memory(
        target, quantization=scheme, card=card, context=2048, draft_tokens=6, prefill_chunk=1024, cache_type="full"
    )
    trained = plan.target.max_position_embeddings or plan.longest_context
    return min(plan.longest_context, trained)
