"""Files of conversations: lines, lists, tables and folders; ids; what is left out, and what is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle31_hf.errors import TrainingError
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.rows import Conversation

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def read_files(folder: Path, **files: str | bytes) -> list[Conversation]:
    """Conversations of files with these contents, by name (`__` for the dot)."""
    paths = []
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        paths.append(path)
    return read_conversations(paths)


def test_lines_have_ids_and_categories(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "conversations": SAID},
        {"messages": SAID, "category": "maths"},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"text": "Plain text."},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = read_conversations([tmp_path])
    assert [row.id for row in found] == ["a", "mixed-3", "81", "mixed-7"]
    assert [row.category for row in found] == ["mixed", "maths", "writing", "mixed"]
    assert [row.is_text for row in found] == [False] * 3 + [True]
    assert len(read_conversations([file], limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', r"bad\.jsonl, line 2: not JSON \(Expecting value at character 7\);"),
        ("[" * 100_000, r"bad\.jsonl, line 2: not usable JSON"),
        ("9" * 5000, "line 2: (not usable JSON|a row is a number)"),
        ("[1, 2]", r"bad\.jsonl, line 2: a row is a list"),
        ('{"answer": "x"}', r"line 2: no messages \(keys: answer\)"),
        ('{"messages": ["x"]}', r"line 2, messages\[0\] is text"),
        ('{"messages": [{"content": "x"}]}', r"line 2, messages\[0\] has no role"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2, messages\[0\]: content is a number"),
        ('{"messages": [{"from": "robot", "value": "x"}]}', r"line 2, messages\[0\] is from 'robot', a speaker nobody"),
        ('{"prompt": "x", "answer_ids": ["y"]}', r"line 2: answer_ids holds something else"),
        ('{"prompt": "x", "answer_temperature": "warm"}', r"line 2: answer_temperature is 'warm'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        read_files(tmp_path, bad__jsonl='{"prompt": "Hello"}\n' + line + "\n")


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_one_list_of_rows_is_read_as_lines_are(tmp_path: Path, indent: int | None, mark: bytes) -> None:
    rows = [{"id": "a", "conversations": SHARE}, {"conversations": SHARE}, {"prompt": "Why?"}]
    as_list = read_files(tmp_path, rows__json=mark + json.dumps(rows, indent=indent).encode())
    assert as_list == read_files(tmp_path, rows__jsonl=mark + "\n".join(map(json.dumps, rows)).encode())
    assert [row.id for row in as_list] == ["a", "rows-2", "rows-3"]


def test_a_bad_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"chats\.json, read as one list of rows: not JSON \(.* at line 5, column"):
        read_files(tmp_path, chats__json='\n\n[\n{"prompt": "x"},\n{"prompt" "y"}]')
    with pytest.raises(TrainingError, match=r"chats\.json, row 2: a row is text"):
        read_files(tmp_path, chats__json='[{"prompt": "x"}, "y"]')


def test_a_file_is_named_once(tmp_path: Path) -> None:
    row = json.dumps({"question_id": 81, "turns": ["A question"]})
    found = read_files(tmp_path, mt_bench__jsonl=row, spec_bench__jsonl=row)
    assert [row.id for row in found] == ["81", "81"], "ids are names, and files may share them"
    for sources in ([tmp_path / "mt_bench.jsonl"] * 2, [tmp_path, tmp_path / "spec_bench.jsonl"]):
        with pytest.raises(TrainingError, match=r"bench\.jsonl is named twice; name every file once"):
            read_conversations(sources)


EMPTY_ROWS: tuple[dict[str, Any], ...] = (
    {"conversations": []}, {"messages": None}, {"prompt": ""}, {"text": " \n"}, {"turns": [""]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]},
    {"conversations": [{"from": "human", "value": " "}]}, {"prompt": [], "completion": []},
)  # fmt: skip


@pytest.mark.parametrize("empty", EMPTY_ROWS)
def test_an_empty_row_among_good_ones_is_left_out_and_told(tmp_path: Path, empty: dict[str, Any]) -> None:
    file, told = tmp_path / "rows.jsonl", list[str]()
    file.write_text("\n".join(json.dumps(row) for row in ({"messages": SAID}, empty, {"prompt": "Why?"})))
    assert [row.id for row in read_conversations([file], on_empty=told.append)] == ["rows-1", "rows-3"]
    assert told == [f"{file}, line 2"]
    file.write_text(json.dumps(empty))
    with pytest.raises(TrainingError, match="no conversations"):
        read_conversations([file])


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    for source, message in (
        (tmp_path / "missing.jsonl", "no file or folder"),
        ("4", "'4' where prompts are wanted"),
        (tmp_path, r"holds no \*\.jsonl"),
    ):
        with pytest.raises(TrainingError, match=message):
            read_conversations([source])
    with pytest.raises(TrainingError, match="no conversations"):
        read_files(tmp_path, empty__jsonl="\n")
    with pytest.raises(TrainingError, match="not UTF-8"):
        read_files(tmp_path, latin__jsonl=b'{"prompt": "\xe9"}\n')
