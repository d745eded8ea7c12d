"""Targets with their drafters, loops, and how the contract compares a text with the one plain `generate` writes."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from families import RECURRENT_FAMILIES, SEEING_FAMILIES, SEEING_HYBRIDS, TEXT_FAMILIES, recurrent_target
from helpers import (
    FAMILIES,
    assert_same_text,
    drafter_of,
    left_padded,
    prompts_for,
    random_drafter,
    random_target,
    stats_of,
    target_of,
)
from helpers import write as write_greedily

TARGETS = (*FAMILIES, "stories260K", "demo-target")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 5},
    "tree": {"num_assistant_tokens": 5, "draft_top_k": 2, "draft_tree_size": 15},
}
COMPILED = {f"{name} compiled": {**shape, "acceleration": "compile"} for name, shape in SHAPES.items()}
LOOPS = {**SHAPES, **COMPILED}
NEW_TOKENS = 24
write = partial(write_greedily, max_new_tokens=NEW_TOKENS)
WRITTEN: dict[str, dict[str, Any]] = {name: {} for name in TARGETS}
"""Plain texts of each target: the same ones are compared with several loops."""


def assert_plain(name: str, inputs: dict[str, Tensor], loop: str, **how: Any) -> Tensor:
    """A text of this target is plain's, by our loop and without a step down."""
    how = {"max_new_tokens": NEW_TOKENS, "written": WRITTEN[name], **how}
    how["settings"] = LOOPS[loop] | how.get("settings", {})
    text = assert_same_text(target_of(name), drafter_of(name), inputs, **how)
    assert stats_of(name).fallbacks == []
    return text


@cache
def prompts(name: str, rows: int) -> dict[str, Tensor]:
    return left_padded(prompts_for(name, rows, seed=17))


@cache
def free_text(name: str, rows: int) -> Tensor:
    """New tokens `(rows, NEW_TOKENS)` of a text that nothing ends."""
    inputs = prompts(name, rows)
    return write(name, inputs)[:, inputs["input_ids"].shape[1] :]


SEEING = {**SEEING_FAMILIES, **SEEING_HYBRIDS}


@cache
def pair(family: str) -> tuple[Any, Any]:
    if family in SEEING:
        model = SEEING[family].model()
    elif family in RECURRENT_FAMILIES:
        model = recurrent_target(family)
    else:
        model = random_target(TEXT_FAMILIES[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 4])
