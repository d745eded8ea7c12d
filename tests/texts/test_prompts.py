"""Prompts that people measure by, read as they are published."""

import json
from pathlib import Path
from unittest import mock

import pytest

from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.errors import Eagle31Error, TrainingError
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.prompts import PLACEHOLDER, embedded_prompts, read_prompts
from helpers import SHARED


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
        ({"question_id": 1}, "line 1: no messages"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "line 1: no prompt"),
        ({"text": "not asked"}, "line 1: no prompt"),
        ("a string", "line 1: a row is text"),
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
