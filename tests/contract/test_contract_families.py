"""The contract for every family that a loop may meet: plain's text, or a refusal that says why.

Targets are tiny and random; those whose layers keep states remember long (`recurrent_target`), so that a state that is
not rolled back shows in the text. What a target sees (a picture) must change its text, or nothing would be tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import LOOPS, SEEING, pair
from torch import Tensor

from families import RECURRENT_FAMILIES, TEXT_FAMILIES
from helpers import assert_same_text, prompts_of
from matrix import pairwise

pytestmark = pytest.mark.contract

PLAIN = dict.fromkeys(("bloom", "gpt_neo"), "self-test") | dict.fromkeys(
    ("jamba", "zaya"), "code that cannot be record"
)
"""Families whose layers take no mask of one's own, and those whose recurrence cannot be recorded; why they are left."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 30},
}
PROMPTS = ("one", "ragged", "a picture", "ragged pictures")


def inputs_of(family: str, prompt: str) -> dict[str, Tensor]:
    """Across windows of eight. Of the ragged prompts one is a single token, one shorter than convolutions look."""
    if prompt == "a picture":
        return SEEING[family].inputs(1)
    if prompt == "ragged pictures":
        return SEEING[family].inputs(1, rows=3, padding=[0, 5, 2])
    inputs = prompts_of([23] if prompt == "one" else [1, 3, 30, 12])
    if family in SEEING:
        inputs["input_ids"] = inputs["input_ids"] % 80  # no token of a picture
    return inputs


def can_be_read(family: str, prompt: str, *_: str) -> bool:
    return family in SEEING or "picture" not in prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prompt", "loop", "way"),
    pairwise(
        [*TEXT_FAMILIES, *RECURRENT_FAMILIES, *SEEING], PROMPTS, [*LOOPS], [*WAYS], allowed=can_be_read
    ),
)  # fmt: skip
def test_text_is_plains(family: str, prompt: str, loop: str, way: str) -> None:
    """Where layers keep states, a tree that was asked for is drafted as a chain."""
    target, drafter = pair(family)
    why = PLAIN.get(family, "")
    text = assert_same_text(
        target, drafter, inputs_of(family, prompt), loop="plain" if why else "own", why=why, oracle=1,
        settings=LOOPS[loop], **WAYS[way],
    )  # fmt: skip
    told = any("trees are drafted as chains" in fallback for fallback in drafter.stats.fallbacks)
    assert told == ("tree" in loop and drafter.binding.has_states and not why)
    assert prompt != "ragged pictures" or not torch.equal(text[0], text[1]), "each row sees its own picture"


@pytest.mark.parametrize("family", SEEING)
def test_a_picture_changes_the_text(family: str) -> None:
    texts = [assert_same_text(*pair(family), SEEING[family].inputs(picture), oracle=1) for picture in (1, 2)]
    assert not torch.equal(*texts), "or nothing is tested"
