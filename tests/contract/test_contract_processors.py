"""The contract under logits processors, transformers' and the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import OWN, SHAPES, assert_loop_agrees, batch_of
from torch import Tensor

from matrix import matrix


def one_third(row: int, ids: Tensor) -> list[int]:
    return list(range((row + len(ids)) % 3, 96, 3))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 96, 2))},
    "bad_words": {"bad_words_ids": [[i] for i in range(4, 40)] + [[50, 51], [60, 61, 62]]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": one_third},
    "sequence_bias": {"sequence_bias": [[[i], -4.0] for i in range(20, 60)] + [[[70, 71], 3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10, 60)), "begin_suppress_tokens": [61, 62, 63]},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 5},
    "encoder_pair": {"encoder_repetition_penalty": 1.5},
    "forced_eos": {"forced_eos_token_id": 7},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [9, 11, 13]},
}


@pytest.mark.parametrize(
    ("name", "processor", "loop", "size"),
    # With the compiled loop, where rows that have ended stay in the batch.
    matrix(["llama", "qwen3"], [*PROCESSORS], [*SHAPES, "tree compiled"], (1, 3)),
)
def test_processors(name: str, processor: str, loop: str, size: int) -> None:
    kwargs = PROCESSORS[processor]
    assert assert_loop_agrees(name, batch_of(name, size, **kwargs), OWN[loop], **kwargs) == 0


def test_processors_change_the_text() -> None:
    """Else the test above would hold for a loop that forgets them."""
    for processor, kwargs in PROCESSORS.items():
        without = batch_of("llama", 3).plain
        assert not torch.equal(batch_of("llama", 3, **kwargs).plain, without), processor
