"""Answers inside a grammar: JSON that follows its schema, functions that have to be called."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from eagle31_hf.demo import target_path
from eagle31_hf.sampling.grammar import GrammarProcessor, OpenThought
from loopback import MESSAGES, MODEL, TOOL_TEMPLATE, serving

FREE = "Tell me of a river."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "day": {"enum": ["Saturday", "Sunday"]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["Saturday", "Sunday"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 5, "logit_bias": {"300": 2}}])
@pytest.mark.thorough(every=2)
def test_json_is_drafted_inside_its_grammar(client, monkeypatch, how):
    """The same texts as without, alone and beside others, by more accepted drafts: where one token alone may come."""
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}

    def ask(content):
        settings = (
            {"temperature": 0, "max_tokens": 128} | how | ({} if content == FREE else {"response_format": wanted})
        )
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=MODEL, messages=messages, **settings)

    questions = ["How will the weather be?", "Where shall we go on Sunday?", FREE]
    alone = [ask(each) for each in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    monkeypatch.setattr(GrammarProcessor, "fork_for_drafts", None)
    outside = [ask(each) for each in questions]
    texts = [[told.choices[0].message.content for told in way] for way in (alone, together, outside)]
    assert texts[0] == texts[1] == texts[2]
    inside, without = (
        [told.usage.completion_tokens_details.accepted_prediction_tokens for told in way[:2]]
        for way in (alone, outside)
    )
    assert all(json.loads(text)["day"] for text in texts[0][:2])
    assert sum(inside) >= sum(without) + 5, (inside, without)


@pytest.fixture(scope="module")
def thinking(pair):
    """The same pair under a template that opens each answer's thought."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = TOOL_TEMPLATE + "<think>\n"
    with serving(pair._replace(tokenizer=tokenizer)) as made:
        yield made.client()


DAY = WEATHER["function"]["parameters"]
FORCED = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DAY}}},
    {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    {"tools": [WEATHER], "tool_choice": "required"},
]


@pytest.mark.parametrize("asked", FORCED, ids=["schema", "choice", "call"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
def test_a_grammar_holds_behind_a_thought_that_the_template_opens(thinking, asked, sampling):
    pytest.importorskip("llguidance")
    kwargs = {"temperature": 0, "max_tokens": 120} | sampling | asked
    told = thinking.chat.completions.create(model=MODEL, messages=MESSAGES, **kwargs).choices[0].message
    assert told.model_extra["reasoning_content"] == told.model_extra["reasoning"]
    if "tools" in asked:
        assert json.loads(told.tool_calls[0].function.arguments)["day"] in ("Saturday", "Sunday")
    else:
        assert told.content in ("yes", "no") or json.loads(told.content)["day"]


def test_a_thought_ends_where_it_is_ended():
    """By any tokens, found once."""
    tokens = ["a", "b", "</", "think", ">", "c"]
    tokenizer: Any = Mock(return_value={"input_ids": [9]}, decode=lambda ids: "".join(tokens[i] for i in ids))
    thought = OpenThought(tokenizer, "</think>", 3)
    assert [thought.length(range(n)) for n in range(7)] == [None] * 5 + [5, 5]
    assert [thought.forced(range(n)) for n in range(5)] == [None, None, None, 9, None]
