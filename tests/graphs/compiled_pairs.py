"""Pairs to compile for, and what they write."""

from __future__ import annotations

from typing import Any

from eagle31_hf import Eagle31Drafter
from helpers import CONFIGS, configured, left_padded, oracle_drafts, random_drafter, random_target

CHAIN: dict[str, Any] = {"num_assistant_tokens": 5}
# As many nodes as are compiled for a chain.
NARROW: dict[str, Any] = {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 4}
WINDOWED = ("mistral", "gemma3")  # families with sliding windows
NEW_TOKENS = 40


def pair_of(family: str, layers: int = 4, **overrides: Any) -> Eagle31Drafter:
    """A drafter of its own attached to a target of its own, so that no test sees another's graphs."""
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return random_drafter(random_target(config), aux_layers=[0, 1, min(2, layers)], **overrides)


def write(drafter: Eagle31Drafter, prompts: list[list[int]], oracle_seed: int = 0, **fields: Any) -> tuple[Any, Any]:
    """What the target writes plainly, and with the drafter under these settings."""
    target, inputs = drafter.binding.model, left_padded(prompts)
    kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**kwargs)
    with (
        configured(drafter, speculation_loop="own", acceleration="compile", **fields),
        oracle_drafts(plain, inputs["input_ids"].shape[1], oracle_seed),
    ):
        return plain, target.generate(**kwargs, assistant_model=drafter)
