"""The contract: whatever the drafter, the loop and the draft's shape, the text is the one plain `generate` writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from agreement import (
    COMPILED,
    DEMO_GROUPS,
    GROUPS,
    NOT_WHOLE,
    OWN,
    SHAPES,
    Batch,
    assert_loop_agrees,
    inputs_of,
    plain_batch,
)

from eagle31_hf import Eagle31Drafter
from eagle31_hf.loop.pair import Pair
from helpers import (
    DEMO_DRAFTER,
    MODELS,
    assert_same_or_tie,
    configured,
    drafter_of,
    left_padded,
    prompts_for,
)
from matrix import WHOLE, pairwise

# --- prompts, batches, depths -----------------------------------------------------------------------------------------


def by_pair(cases: Iterable[Any]) -> dict[tuple[str, str], list[int]]:
    """Of each target and shape, which batches of the target they are tried on."""
    tried: dict[tuple[str, str], list[int]] = {}
    for name, shape, index in cases:
        tried.setdefault((name, shape), []).append(index)
    return tried


WHOLE_BATCHES = by_pair(itertools.product(WHOLE, OWN, range(len(GROUPS))))


def has_batch(name: str, shape: str, index: int) -> bool:
    return index < len(DEMO_GROUPS if name == "demo-target" else GROUPS)


OTHER_BATCHES = by_pair(pairwise(NOT_WHOLE, [*OWN], range(len(GROUPS)), allowed=has_batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "indices"),
    [
        *((*pair, indices) for pair, indices in WHOLE_BATCHES.items()),
        *(pytest.param(*pair, indices[:1], marks=pytest.mark.contract) for pair, indices in OTHER_BATCHES.items()),
        *((*pair, indices[1:]) for pair, indices in OTHER_BATCHES.items() if indices[1:]),
    ],
    ids=lambda value: f"{len(value)} batches" if isinstance(value, list) else value,
)
@pytest.mark.thorough(every=3)
def test_own_loop_writes_the_plain_text(name: str, shape: str, indices: list[int]) -> None:
    """506 prompts over all targets: batches of 1, 3 and 8, ragged, chunked and not, right and wrong drafts."""
    ties, sizes = 0, set()
    for index in indices:
        batch = plain_batch(name, inputs_of(name)[index])
        sizes.add(len(batch.plain))
        ties += assert_loop_agrees(
            name,
            batch,
            OWN[shape] | {"num_assistant_tokens": index % 7 + (1 if shape == "chain" else 2)},  # a tree has two levels
            oracle=index % 2 == 0,
            prefill_chunk_size=5 if index % 3 == 0 else None,
        )
    assert ties <= 1
    if shape in COMPILED:  # else all of it may have been served by eager code
        kinds = {"chain": "draft", "tree": "draft"}
        made = {(kinds.get(kind, kind), rows) for kind, rows, *_ in Pair.of(drafter_of(name)).graphs.keys}
        end = ["advance"] if name in WHOLE else []  # one graph accepts and drafts again; short texts may need none
        wanted = ("verify", "draft", *end)
        assert made >= {(kind, rows) for kind in wanted for rows in sizes}


@pytest.mark.contract
@pytest.mark.parametrize(("name", "shape", "chunk"), pairwise(("llama", "gemma3", "mistral"), [*OWN], (1, 2, 7, 1000)))
def test_prompts_in_chunks(name: str, shape: str, chunk: int) -> None:
    batch = plain_batch(name, inputs_of(name)[-1])
    assert assert_loop_agrees(name, batch, OWN[shape], prefill_chunk_size=chunk) == 0


def test_oracle_reaches_every_number_of_accepted_tokens() -> None:
    """Else the tests above would not see what they are for."""
    for loop in SHAPES.values():
        ended = torch.zeros(5, dtype=torch.long)  # rounds that accepted 0, 1, ... 4 tokens and no more
        for inputs in inputs_of("llama")[:8]:
            assert_loop_agrees("llama", plain_batch("llama", inputs), loop | {"num_assistant_tokens": 4})
            stats = drafter_of("llama").stats
            assert stats is not None
            reached = torch.tensor([*stats.reached_at, stats.accepted_at[-1]])
            accepted = torch.tensor([*stats.accepted_at, 0])
            ended[: len(reached)] += reached - accepted
        assert ended.min() > 0, f"{loop}: {ended.tolist()}"


# --- bf16 -------------------------------------------------------------------------------------------------------------


@cache
def bf16_pair() -> Eagle31Drafter:
    target = hf.AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.bfloat16).eval()
    return Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)


@cache
def bf16_texts() -> list[Batch]:
    """Six prompts, and what the target alone writes after them; a machine without bf16 arithmetic takes long for it."""
    target, options = bf16_pair().binding.model, {"do_sample": False, "max_new_tokens": 32}
    prompts = [left_padded([prompt]) for prompt in prompts_for("demo-target", 6)]
    return [Batch(inputs | options, target.generate(**inputs, **options)) for inputs in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("loop", SHAPES)
def test_bf16_differs_only_in_ties(loop: str) -> None:
    target, ties = bf16_pair().binding.model, 0
    with configured(bf16_pair(), num_assistant_tokens=5, **SHAPES[loop]) as drafter:
        for batch in bf16_texts():
            ours = target.generate(**batch.inputs, assistant_model=drafter)
            ties += assert_same_or_tie(target, batch.plain, ours)
    assert ties < len(bf16_texts()) // 2, "most texts have no tie at all"
