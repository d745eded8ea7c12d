"""Text as it grows: stop strings across tokens, thoughts and calls across pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.serving.answer_parts import AnswerParser
from eagle31_hf.serving.text import StopScanner, TextWriter


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_goes_through_up_to_the_first_stop_however_it_is_cut(text, stops, data):
    scanner, shown, at = StopScanner(stops), "", 0
    while at < len(text) and not scanner.found:
        step = data.draw(st.integers(1, 5))
        shown += scanner.feed(text[at : at + step])
        at += step
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if scanner.found:
        assert first is not None
        assert shown == text[:first] or any(text[:at].find(stop) == len(shown) for stop in stops)
    else:
        assert first is None
        assert shown + scanner.flush() == text


def test_a_text_ends_in_the_middle_of_a_round(pair):
    ids = pair.tokenizer("We like bread and butter", add_special_tokens=False)["input_ids"]
    writer = TextWriter(pair.tokenizer, max_new_tokens=3, eos_ids=frozenset([2]), stops=[])
    added, shown = writer.append(ids)
    assert (added, writer.finish, writer.remaining) == (3, "length", 0)
    assert shown == pair.tokenizer.decode(ids[:3])
    writer = TextWriter(pair.tokenizer, max_new_tokens=30, eos_ids=frozenset([2]), stops=["bread"])
    added, shown = writer.append([*ids, 2])
    assert (writer.finish, shown) == ("stop", "We like ")
    assert added < len(ids)
    writer = TextWriter(pair.tokenizer, max_new_tokens=30, eos_ids=frozenset([2]), stops=["breadcrumbs"])
    assert writer.append([*ids, 2, 5])[0] == len(ids) + 1
    assert (writer.finish, writer.tokens[-1]) == ("stop", 2)


def parts_of(text, cuts=1, **parser):
    made = AnswerParser(**parser)
    parts = [part for at in range(0, len(text), cuts) for part in made.feed(text[at : at + cuts])] + made.finish()
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call],
    )


CALL = '{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}'
SAME = ("f", {"x": [1, {"y": "}"}]})


@pytest.mark.parametrize("cuts", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parser", "wanted"),
    [
        ("Hello < world <think", {}, ("", "Hello < world <think", [])),
        ("<think>Let me see.</think>\n\nYes.", {}, ("Let me see.", "Yes.", [])),
        ("\n<think>\nHm.</think>Yes.", {}, ("Hm.", "Yes.", [])),
        ("So be it.</think>Yes.", {"thinks": True}, ("So be it.", "Yes.", [])),
        ("never ends", {"thinks": True}, ("never ends", "", [])),
        ("I say <think> and mean it", {}, ("", "I say <think> and mean it", [])),
        (f"<tool_call>\n{CALL}\n</tool_call>", {"tools": ["f"]}, ("", "", [SAME])),
        (f"Sure.\n<tool_call>{CALL}</tool_call>", {"tools": ["f"]}, ("", "Sure.", [SAME])),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", {"tools": ["f"]}, ("", "", [SAME, SAME])),
        (f"<think>a</think>\n<tool_call>{CALL}</tool_call>", {"tools": ["f"]}, ("a", "", [SAME])),
        (CALL, {"tools": ["f"]}, ("", "", [SAME])),
        (f"[{CALL}, {CALL}]", {"tools": ["f"]}, ("", "", [SAME, SAME])),
        ('{"name": "f", "parameters": {"x": 1}}', {"tools": ["f"]}, ("", "", [("f", {"x": 1})])),
        (CALL, {}, ("", CALL, [])),
        (CALL, {"tools": ["g"]}, ("", CALL, [])),
        ("{ not JSON", {"tools": ["f"]}, ("", "{ not JSON", [])),
        ("<tool_call>{ not JSON</tool_call>!", {"tools": ["f"]}, ("", "<tool_call>{ not JSON</tool_call>!", [])),
        (f"<tool_call>{CALL}", {"tools": ["f"]}, ("", "", [SAME])),
    ],
)
def test_answers_come_apart_the_same_however_they_are_cut(text, parser, wanted, cuts):
    assert parts_of(text, cuts, **parser) == wanted
