"""The contract where a text ends: end of sequence, criteria, stop strings and limits inside a block of drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import transformers as hf
from agreement import COMPILED, NEW_TOKENS, OWN, SHAPES, Batch, assert_loop_agrees, batch_of, greedy, plain_batch
from torch import Tensor

from helpers import FAMILIES, demo_tokenizer, left_padded, oracle_drafts, prompts_for
from matrix import matrix, pairwise


class DigitSum(hf.StoppingCriteria):
    """Ends a row when the ids since the prompt add up to a multiple of `divisor`."""

    def __init__(self, prompt_length: int, divisor: int):
        self.prompt_length, self.divisor = prompt_length, divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, self.prompt_length :].sum(1) % self.divisor == 0


def has_rows(name: str, loop: str, size: int) -> bool:
    """That rows of the demo target end, few of them show as well."""
    most = dict.fromkeys(COMPILED, 1 if name == "demo-target" else 8)
    return size <= most.get(loop, 3 if name == "demo-target" else 8)


@pytest.mark.parametrize(
    ("name", "loop", "size"), matrix([*FAMILIES, "demo-target"], [*OWN], (1, 3, 8), allowed=has_rows)
)
@pytest.mark.thorough(every=4)
def test_end_of_sequence_inside_a_draft(name: str, loop: str, size: int) -> None:
    free = batch_of(name, size)
    new = free.plain[:, free.prompt_length :]
    for at in (0, 1, 4, 11):
        stops = {int(new[0, at]), int(new[-1, (at + 5) % NEW_TOKENS])} - set(free.inputs["input_ids"][:, -1].tolist())
        ends = {"eos_token_id": sorted(stops)}
        if not stops:
            continue
        batch = plain_batch(name, free.inputs, **ends)
        assert batch.plain.shape[1] < free.plain.shape[1] or size > 1
        with oracle_drafts(free.plain, free.prompt_length, seed=at):  # drafts that go on behind the end
            assert_loop_agrees(name, batch, OWN[loop], oracle=False, **ends)


@pytest.mark.parametrize(("name", "shape", "eos"), matrix(FAMILIES, [*OWN], (False, True)))
def test_custom_criteria_inside_a_block(name: str, shape: str, eos: bool) -> None:
    """Of one text; those of a batch may look at all rows (tests/generate/test_callers_code.py)."""
    free, divisor = batch_of(name, 1), (3, 7)[FAMILIES.index(name) % 2]
    ids = {"eos_token_id": int(free.plain[0, -3])} if eos else {}
    rules = {"stopping_criteria": hf.StoppingCriteriaList([DigitSum(free.prompt_length, divisor)])}
    batch = Batch(free.inputs, greedy(name, free.inputs, **ids, **rules))
    with oracle_drafts(free.plain, free.prompt_length, seed=divisor):
        assert_loop_agrees(name, batch, OWN[shape], oracle=False, **ids, **rules)


@cache
def stopped_batch(size: int, start: int) -> tuple[Batch, Batch, dict[str, Any]]:
    """A batch as it goes on, as strings stop it, and how: once, as transformers takes a second to prepare strings."""
    free = batch_of("demo-target", size, max_new_tokens=14)
    texts = demo_tokenizer().batch_decode(free.plain[:, free.prompt_length :])
    stops = {"stop_strings": [texts[0][start : start + 4], texts[-1][start + 9 : start + 11]]}
    settings = stops | {"tokenizer": demo_tokenizer(), "max_new_tokens": 14}
    return free, Batch(free.inputs, greedy("demo-target", free.inputs, **settings)), settings


@pytest.mark.contract
@pytest.mark.parametrize(("shape", "size", "start"), pairwise([*OWN], (1, 3, 8), (3, 17)))
def test_stop_strings_inside_a_block(shape: str, size: int, start: int) -> None:
    free, batch, settings = stopped_batch(size, start)
    with oracle_drafts(free.plain, free.prompt_length, seed=start):
        assert_loop_agrees("demo-target", batch, OWN[shape], oracle=False, **settings)


@pytest.mark.contract
@pytest.mark.parametrize("loop", SHAPES)
def test_limits_of_length_and_time(loop: str) -> None:
    for name, rows in (("qwen3", 1), ("qwen3", 3), ("demo-target", 1)):
        inputs = left_padded(prompts_for(name, rows))
        longer = {"max_new_tokens": None, "max_length": inputs["input_ids"].shape[1] + 7}
        for limit in ({"max_new_tokens": 1}, {"max_new_tokens": 2}, longer, {"max_time": 1e-9}):
            batch = Batch(inputs, greedy(name, inputs, **limit))
            assert assert_loop_agrees(name, batch, SHAPES[loop] | {"num_assistant_tokens": 8}, **limit) == 0
