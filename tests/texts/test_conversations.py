"""Files of conversations; every form of row, read with all its parts or refused by the name of what cannot be read; and
prompts that people measure by, read as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.errors import Eagle31Error, TrainingError
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.prompts import PLACEHOLDER, embedded_prompts, read_prompts
from eagle31_hf.texts.rows import Conversation, conversation_from_row
from helpers import SHARED

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Arr"}]
PIRATE = {"role": "system", "content": "You are a pirate."}


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
        ('{"messages": ["x"]}', r"line 2, messages\[0\] is text; wanted an object with role and content"),
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


# --- forms of rows ----------------------------------------------------------------------------------------------------


def row(**fields: Any) -> Conversation:
    return conversation_from_row(fields, where="row", fallback_id="r", category="c")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def answered(**fields: Any) -> list[dict[str, Any]]:
    """The chat, whose answer has these fields, too."""
    return [SAID[0], SAID[1] | fields]


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
    "reasoning": ({"messages": answered(reasoning="hm")}, answered(reasoning_content="hm")),
    "reasoning by both names": (
        {"messages": answered(reasoning_content="hm", reasoning="other")},
        answered(reasoning_content="hm"),
    ),
    "weight 0": ({"messages": answered(weight=0)}, answered(weight=0)),
    "not trained": ({"messages": answered(train=False)}, answered(weight=0)),
    "without loss": ({"messages": answered(loss=False)}, answered(weight=0)),
    "weight 1, trained, with loss": ({"messages": answered(weight=1, train=1, loss=1)}, SAID),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_parts_of_a_row_are_read(form: str) -> None:
    fields, messages = FORMS[form]
    assert list(row(**fields).messages) == messages


def test_tools_may_be_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert row(messages=SAID, tools=json.dumps(tools)) == row(messages=SAID, tools=tools)


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


# --- prompts to measure by --------------------------------------------------------------------------------------------


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "name", "category", "words"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}, "81", "writing", "One."),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}, "HumanEval/0", "file", "def f():"),
        ({"question": "How many?", "answer": "2"}, "1", "file", "How many?"),
        ({"id": "a", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"},
                                  {"role": "assistant", "content": "A"}]}, "a", "file", "U"),
        ({"instruction": "Do.", "turns": None}, "1", "file", "Do."),
        ({"turns": "One."}, "1", "file", "One."),
    ],
)  # fmt: skip
def test_rows_are_read_as_they_are_published(tmp_path, row, name, category, words):
    (prompt,) = read_prompts([write(tmp_path / "file.jsonl", row)])
    assert (prompt.id, prompt.suite, prompt.category) == (f"file/{name}", "file", category)
    assert prompt.messages[-1] == {"role": "user", "content": words}


def test_a_prompt_ends_with_the_first_unanswered_turn_or_the_users_third_at_most(tmp_path):
    turns = [{"role": "assistant" if i % 2 else "user", "content": str(i)} for i in range(8)]
    rows = [
        {"system": "Be brief.", "turns": ["t", "u"]},
        {"turns": ["t", "u"]},
        *({"conversations": turns[:n]} for n in (8, 2)),
    ]
    prompts = read_prompts([write(tmp_path / "file.jsonl", *rows)])
    told = [[turn["content"] for turn in prompt.messages] for prompt in prompts]
    assert told == [["Be brief.", "t"], ["t"], ["0", "1", "2", "3", "4"], ["0"]]


def test_the_published_files():
    folder = SHARED / "data" / "prompts"
    mt_bench = read_prompts([f"mt-bench={folder / 'spec_bench_question.jsonl'}"])
    assert len(mt_bench) == 80
    assert len({prompt.category for prompt in mt_bench}) == 8
    assert len(read_prompts([str(folder / "spec_bench_question.jsonl")])) == 480
    assert len(read_prompts([str(folder / "HumanEval.jsonl"), f"gsm8k={folder / 'gsm8k_test_500.jsonl'}"])) == 664
    few = read_prompts([f"mt-bench={folder / 'spec_bench_question.jsonl'}"], limit=8)
    assert len({prompt.category for prompt in few}) == 8, "few of them are still of every kind"


def test_a_hub_data_set_is_read_by_its_test_split(monkeypatch):
    asked = []
    data = {"train": [{"prompt": "no"}], "test": [{"prompt": "yes", "category": "kind"}]}

    def load(repository, config, split=None):
        asked.append((repository, config, split))
        if split is not None:
            return [{"prompt": split}]
        if repository not in ("org/data", "org/one", "org/two"):
            raise ConnectionError("no way\nthere")
        return {"org/data": data, "org/one": {"prompts": [{"prompt": "only"}]}, "org/two": {"a": [], "b": []}}[
            repository
        ]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.get_dataset_config_names", lambda repository: ["qualitative"])
    (prompt,) = read_prompts(["speed=org/data:qualitative"])
    assert (prompt.id, prompt.category, prompt.messages[0]["content"]) == ("speed/1", "kind", "yes")
    assert read_prompts(["org/one"])[0].messages[0]["content"] == "only"
    for part in ("train", "train[:1000]", "train[:5%]+test"):
        for source in (f"org/data:{part}", f"org/data:x:{part}"):
            assert read_conversations([source])[0].messages[0]["content"] == part
    assert [asked[0], asked[3]] == [("org/data", "qualitative", None), ("org/data", "x", "train")]
    with pytest.raises(TrainingError, match="no split 'test'; name one of a, b"):
        read_prompts(["org/two"])
    with pytest.raises(TrainingError, match=r"'org/other', and the Hub did not give it: no way; check"):
        read_prompts(["org/other"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["  "]}, "line 1: no prompt"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "line 1: no prompt"),
        ({"text": "not asked"}, "line 1: no prompt"),
        ({"turns": [f"{PLACEHOLDER}: x"], "category": "rag"}, "placeholders: .*prepare.py"),
    ],
)
def test_bad_rows_are_told_with_their_line(tmp_path, row, message):
    with pytest.raises(TrainingError, match=message):
        read_prompts([write(tmp_path / "file.jsonl", row)])


def test_sources_that_give_no_prompt_or_one_twice(tmp_path, monkeypatch):
    same = [{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}]
    one = write(tmp_path / "one.jsonl", *same[:1])
    assert [prompt.id for prompt in read_prompts([f"a={one}", f"b={one}"])] == ["a/7", "b/7"], "told apart by names"
    for source, message in (
        (write(tmp_path / "empty.jsonl"), "are empty"),
        (write(tmp_path / "file.jsonl", *same), r"1 prompt ids stand more than once \(file/7\)"),
    ):
        with pytest.raises(Eagle31Error, match=message):
            read_prompts([source])
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=PermissionError(13, "not yours")))
    with pytest.raises(TrainingError, match=r"file\.jsonl cannot be read \(not yours\)"):
        read_prompts([str(tmp_path / "file.jsonl")])


def test_a_folder_is_one_source_whose_files_share_the_limit(tmp_path):
    for name in "ab":
        rows = [json.dumps({"id": f"{name}{n}", "prompt": "What is two and two?"}) for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    assert [prompt.id for prompt in read_prompts([str(tmp_path)], limit=4)] == ["a/a0", "a/a3", "b/b0", "b/b3"]


def test_the_embedded_prompts_are_of_two_kinds():
    assert {prompt.category for prompt in embedded_prompts()} == {"bookings", "sums"}
    assert len({prompt.id for prompt in embedded_prompts()}) == len(CONVERSATIONS)
