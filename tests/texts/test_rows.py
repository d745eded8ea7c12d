"""Every form of row that people train on: read with all its parts, or refused by the name of what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle31_hf.errors import TrainingError
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.rows import Conversation, conversation_from_row

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Arr"}]
PIRATE = {"role": "system", "content": "You are a pirate."}


def row(**fields: Any) -> Conversation:
    return conversation_from_row(fields, where="row", fallback_id="r", category="c")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


THOUGHT = '<details type="reasoning" done="true">\n> hm\n</details>\nArr'
TREE = {
    "a": {**SAID[0], "parentId": None},
    "b": {"role": "assistant", "content": "another branch", "parentId": "a"},
    "c": {**SAID[1], "parentId": "a"},
}
FORMS = {
    "Alpaca": (
        {"instruction": "Translate.", "input": "Good morning", "output": "Guten Morgen"},
        turns("Translate.\nGood morning", "Guten Morgen"),
    ),
    "Alpaca without input": ({"instruction": "Say hello.", "input": "", "output": "Hi"}, turns("Say hello.", "Hi")),
    "Alpaca with system": ({"system": PIRATE["content"], "instruction": "Hi", "output": "Arr"}, [PIRATE, *SAID]),
    "OpenOrca": ({"system_prompt": PIRATE["content"], "question": "Hi", "response": "Arr"}, [PIRATE, *SAID]),
    "Dolly": ({"instruction": "Who?", "context": "By Anna.", "response": "Anna"}, turns("By Anna.\n\nWho?", "Anna")),
    "input and output": ({"input": "Hi", "output": "Arr"}, SAID),
    "user and assistant": ({"user": "Hi", "assistant": "Arr"}, SAID),
    "ShareGPT with system": ({"system": PIRATE["content"], "conversations": SHARE}, [PIRATE, *SAID]),
    "the same system twice": ({"system": PIRATE["content"], "messages": [PIRATE, *SAID]}, [PIRATE, *SAID]),
    "an empty system": ({"system": "", "messages": SAID}, SAID),
    "ShareGPT by other names": (
        {"conversations": [{"from": "USER", "value": "Hi"}, {"from": " Claude ", "content": "Arr"}]},
        SAID,
    ),
    "messages of ShareGPT's roles": (
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Arr"}]},
        SAID,
    ),
    "WildChat": ({"conversation": SAID}, SAID),
    "prompt and completion": ({"prompt": "Hi", "completion": "Arr"}, SAID),
    "preference": ({"prompt": "Hi", "chosen": "Arr", "rejected": "No"}, SAID),
    "preference of chats": ({"chosen": SAID, "rejected": SAID[:1]}, SAID),
    "KTO, unwanted": ({"prompt": "Hi", "completion": "No", "label": False}, SAID[:1]),
    "KTO, wanted": ({"prompt": "Hi", "completion": "Arr", "label": True}, SAID),
    "prompt of messages": ({"prompt": SAID[:1]}, SAID[:1]),
    "prompt and completion of messages": ({"prompt": SAID[:1], "completion": SAID[1:]}, SAID),
    "preference of messages": ({"prompt": SAID[:1], "chosen": SAID[1:], "rejected": SAID}, SAID),
    "prompt of messages, answer as text": ({"prompt": SAID[:1], "completion": "Arr"}, SAID),
    "turns with system": ({"system": PIRATE["content"], "turns": ["Hi"]}, [PIRATE, SAID[0]]),
    "Open WebUI": ({"title": "t", "chat": {"messages": [{**message, "timestamp": 1} for message in SAID]}}, SAID),
    "Open WebUI with system and reasoning": (
        {"chat": {"params": {"system": PIRATE["content"]}, "messages": [SAID[0], {**SAID[1], "content": THOUGHT}]}},
        [PIRATE, *SAID],
    ),
    "Open WebUI by its tree": ({"chat": {"history": {"currentId": "c", "messages": TREE}}}, SAID),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_parts_of_a_row_are_read(form: str) -> None:
    fields, messages = FORMS[form]
    assert list(row(**fields).messages) == messages


def test_tools_may_be_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert row(messages=SAID, tools=json.dumps(tools)) == row(messages=SAID, tools=tools)


def test_reasoning_has_one_name() -> None:
    """As `serve` reads it in messages."""
    for thought in (
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning_content": "hm", "reasoning": "other"},
    ):
        read = row(messages=[SAID[0], {**SAID[1], **thought}]).messages[1]
        assert read == {**SAID[1], "reasoning_content": "hm"}


@pytest.mark.parametrize("not_learned", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_turns_that_are_not_to_be_learned_are_marked(not_learned: dict[str, Any]) -> None:
    read = row(messages=[SAID[0], {**SAID[1], **not_learned}, *SAID]).messages
    assert [message.get("weight") for message in read] == [None, 0, None, None]
    learned = {name: 1 for name in not_learned}
    assert list(row(messages=[SAID[0], {**SAID[1], **learned}]).messages) == SAID


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": SAID, "context": "Anna"}, "row: context cannot be read here; put it into messages"),
        ({"messages": SAID, "input": "Anna"}, "row: input cannot be read here"),
        ({"turns": ["Hi"], "history": [["a", "b"]]}, "row: history cannot be read here; put it into turns"),
        ({"text": "Once", "system": "Be brief."}, "row: system cannot be read here"),
        ({"messages": [PIRATE, *SAID], "system": "Be brief."}, "system stands beside another system message"),
        ({"instruction": "Hi", "history": [["a", "b"]]}, "history cannot be read here; give the row as messages"),
        ({"question": "Who?", "context": {"title": ["Anna"]}}, "context: content is an object; wanted text"),
        ({"messages": SAID, "functions": [{"name": "f"}]}, "functions cannot be read here"),
        ({"messages": SAID, "images": ["a.png"]}, "images cannot be read here"),
        ({"messages": [{**SAID[0], "function_call": {"name": "f"}}]}, r"messages\[0\]: function_call cannot be read"),
        ({"messages": [SAID[0], {**SAID[1], "weight": 0.5}]}, r"messages\[1\]: weight is 0.5; wanted 0 .* or 1"),
        ({"messages": SAID, "tools": 3}, "tools is a number; wanted a list"),
        ({"messages": [None]}, r"messages\[0\] is null; wanted an object with role and content"),
        ({"messages": SAID, "tools": "{"}, "tools: not JSON"),
        ({"messages": SAID, "tools": ["a"]}, r"tools\[0\] is text; wanted an object"),
        ({"messages": SAID, "chat_template_kwargs": [1]}, "chat_template_kwargs is a list; wanted an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of type image; wanted text alone"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "arguments: not"),
        ({"chat": {"messages": []}}, "chat holds no messages; wanted an export of Open WebUI"),
        ({"chat": {"messages": [{**SAID[0], "files": [{"id": 1}]}]}}, "files cannot be read here"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        row(**fields)


@pytest.mark.parametrize(("name", "delimiter"), [("rows.csv", ","), ("rows.tsv", "\t")])
@pytest.mark.parametrize("columns", [("prompt", "response"), ("question", "answer"), ("user", "assistant")])
def test_tables_of_two_columns(tmp_path: Path, name: str, delimiter: str, columns: tuple[str, str]) -> None:
    file = tmp_path / name
    lines = (delimiter.join(fields) for fields in (columns, ("Hi", "Arr"), ('"a\nb"', '"c, ""d"""'), ("", "")))
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    empty: list[str] = []
    read = read_conversations([tmp_path], on_empty=empty.append)
    assert [list(each.messages) for each in read] == [SAID, turns("a\nb", 'c, "d"')]
    assert empty == [f"{file}, row 3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\nx,y\n", r"row 1: no messages \(keys: a, b\)"),
        ("prompt,response\nx\n", "row 1: more or fewer fields"),
        ("prompt,response\nx,y,z\n", "row 1: more or fewer fields"),
        ('prompt,response\nx,"y"z\n', "after line 1: no table"),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(TrainingError, match=message):
        read_conversations([tmp_path / "rows.csv"])


def test_an_export_of_chats_is_one_list(tmp_path: Path) -> None:
    file = tmp_path / "chat-export-1732.json"
    file.write_text(json.dumps([{"id": "one", "chat": {"messages": SAID}}, {"id": "two", "chat": {"messages": SAID}}]))
    assert [each.id for each in read_conversations([file])] == ["one", "two"]
