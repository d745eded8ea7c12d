"""Texts of a batch as they grow: where a block ends, what fills up a row, who writes on."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.generation import stopping_criteria as stock_criteria

from eagle31_hf.loop.text import Sequences, StopRules


class Even(hf.StoppingCriteria):
    """Ends a row whose last id is even, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked += 1
        return input_ids[:, -1] % 2 == 0


def sequences(rules: StopRules, rows: int = 2) -> Sequences:
    return Sequences(torch.full((rows, 3), 9), [0] * rows, rules, pad_id=0)


def test_stop_rules_are_sorted() -> None:
    even, clock = Even(), stock_criteria.MaxTimeCriteria(100.0)
    criteria = hf.StoppingCriteriaList([
        stock_criteria.MaxLengthCriteria(12), stock_criteria.EosTokenCriteria([2, 7]), clock, even,
    ])  # fmt: skip
    rules = StopRules.from_criteria(criteria, max_length=20)
    assert (rules.max_length, rules.eos_ids, rules.clocks, rules.others) == (12, {2, 7}, [clock], [even])


def test_a_block_ends_at_the_first_stop() -> None:
    even = Even()
    text = sequences(StopRules(max_length=20, others=[even]), rows=1)
    assert text.append(0, [5, 7, 8, 9]) == 3
    assert text.new[0] == [5, 7, 8]
    assert even.asked == 3, "once per token, as generate does"
    assert text.live_rows() == []


def test_a_rule_may_answer_with_a_plain_bool() -> None:
    """As LlamaIndex's does; stock generate takes it, too."""
    rules: list[Any] = [lambda input_ids, scores: bool(input_ids[0][-1] == 7), lambda *_: False]
    text = sequences(StopRules(max_length=20, others=rules), rows=1)
    assert text.append(0, [5, 7, 8]) == 2


def test_end_of_sequence_and_padding() -> None:
    text = sequences(StopRules(max_length=20, eos_ids=frozenset({2})))
    assert text.append(0, [5, 2, 6]) == 2
    assert text.append(1, [5, 5, 5, 2]) == 4
    assert text.assemble()[:, 3:].tolist() == [[5, 2, 0, 0], [5, 5, 5, 2]]


def test_length_limit_inside_a_block() -> None:
    text = sequences(StopRules(max_length=5))
    assert text.append(0, [5, 6, 7]) == 2
    assert text.remaining_tokens(0) == 0
    assert text.live_rows() == [1]


def test_without_end_of_sequence_finished_rows_write_on() -> None:
    """`generate` pads finished rows only if there is an EOS; else they go on until the last row has stopped."""
    text = sequences(StopRules(max_length=20, others=[Even()]))
    text.append(0, [4, 5])
    assert text.stopped_at[0] == 1
    text.append(1, [5, 5])
    assert text.live_rows() == [0, 1]
    text.append(1, [5, 6])
    assert text.stopped_at[1] == 4
    assert text.live_rows() == [0], "row 0 still owes the tokens that generate would have shown"
    text.append(0, [7, 7, 7])
    assert text.live_rows() == []
    assert text.assemble()[:, 3:].tolist() == [[4, 5, 7, 7], [5, 5, 5, 6]]


def test_time_ends_every_row() -> None:
    text = sequences(StopRules(max_length=20, clocks=[stock_criteria.MaxTimeCriteria(-1.0)]))
    text.append(0, [5])
    text.append(1, [6])
    text.stop_if_out_of_time()
    assert text.live_rows() == []
    assert text.assemble()[:, 3:].tolist() == [[5], [6]]


def test_prefix_shows_padding_and_drafts() -> None:
    text = Sequences(torch.tensor([[0, 0, 4]]), [2], StopRules(max_length=9), pad_id=0)
    text.append(0, [5])
    assert text.prefix(0, [6, 7]).tolist() == [[0, 0, 4, 5, 6, 7]]
