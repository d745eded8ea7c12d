"""Training data: rows, masks by template, the draft vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_rows import CHAT, chat, render
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.data import (
    Document,
    build_vocabulary,
    count_supervised,
    coverage,
    render_documents,
    render_turns,
)
from eagle31_hf.training.measure import evaluation_prompts

UNMARKED = (  # the same turns without generation marks
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (  # reasoning of earlier turns left out, as Qwen3's does
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}Thinking. {% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def learned(tokenizer, conversation: Conversation) -> str:
    ids, mask = render(tokenizer, conversation)
    assert len(ids) == len(mask)
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_form_of_row_is_read(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "conversations": CHAT},
        {"messages": CHAT, "category": "maths"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"question": "Why?", "answer": "Because."},
        {"text": "Plain text."},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = read_conversations([tmp_path])
    assert [c.id for c in found] == ["a", "mixed-3", "mixed-5", "81", "mixed-9", "mixed-11"]
    assert [c.category for c in found] == ["mixed", "maths", "mixed", "writing", "mixed", "mixed"]
    assert found[2].messages[1] == {"role": "assistant", "content": "Hello"}
    assert [c.is_text for c in found] == [False] * 5 + [True]
    assert len(read_conversations([file], limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', r"bad\.jsonl, line 2: not JSON"),
        ("[" * 100_000, r"bad\.jsonl, line 2: not usable JSON"),
        ('{"id": ' + "9" * 5000 + "}", r"bad\.jsonl, line 2: not usable JSON"),
        ("[1, 2]", r"bad\.jsonl, line 2: a row is list"),
        ('{"answer": "x"}', r"line 2: no messages \(keys: answer\)"),
        ('{"messages": ["x"]}', r"line 2, messages\[0\] is str"),
        ('{"messages": [{"content": "x"}]}', r"line 2, messages\[0\] has no role"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2, messages\[0\]: content is int"),
        ('{"messages": [{"from": "robot", "value": "x"}]}', r"line 2, messages\[0\] is from 'robot', a speaker nobody"),
        ('{"prompt": [3]}', r"line 2, prompt\[0\] is int"),
        ("[" * 100_000, "line 2: not usable JSON"),
        ("9" * 5000, "line 2: (not usable JSON|a row is int)"),
        ('{"prompt": "x", "answer_ids": ["y"]}', r"line 2: answer_ids holds something else"),
        ('{"id": "same", "prompt": "x"}', "two rows have the id 'same'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": "same", "prompt": "Hello"}\n' + line + "\n")
    with pytest.raises(TrainingError, match=message):
        read_conversations([file])


def read_files(folder: Path, **files: str | bytes) -> list[Conversation]:
    """Conversations of files with these contents, by name (`__` for the dot)."""
    paths = []
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        paths.append(path)
    return read_conversations(paths)


SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_one_list_of_rows_is_read_as_lines_are(tmp_path: Path, indent: int | None, mark: bytes) -> None:
    rows = [{"id": "a", "conversations": SHARE}, {"conversations": SHARE}, {"prompt": "Why?"}]
    as_list = read_files(tmp_path, rows__json=mark + json.dumps(rows, indent=indent).encode())
    as_lines = read_files(tmp_path, rows__jsonl=mark + "\n".join(map(json.dumps, rows)).encode())
    assert as_list == as_lines
    assert [row.id for row in as_list] == ["a", "rows-2", "rows-3"]


def test_a_folder_may_hold_lists(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text(json.dumps([{"messages": CHAT}]))
    assert len(read_conversations([tmp_path])) == 1
    with pytest.raises(TrainingError, match=r"chats\.json, read as one list of rows: not JSON .*line 3"):
        read_files(tmp_path, chats__json='[\n{"prompt": "x"},\n{"prompt" "y"}]')
    with pytest.raises(TrainingError, match=r"chats\.json, row 2: a row is str"):
        read_files(tmp_path, chats__json='[{"prompt": "x"}, "y"]')


def test_ids_that_files_share_are_told_apart(tmp_path: Path) -> None:
    row = json.dumps({"question_id": 81, "turns": ["A question"]})
    found = read_files(tmp_path, mt_bench__jsonl=row, spec_bench__jsonl=row)
    assert [row.id for row in found] == ["81", "spec_bench/81"]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "spec_bench.jsonl").write_text(row)
    files = [tmp_path / "mt_bench.jsonl", tmp_path / "spec_bench.jsonl", tmp_path / "again"]
    assert [row.id for row in read_conversations(files)] == ["81", "spec_bench/81", "spec_bench/81-2"]
    assert read_conversations(files) == read_conversations(files), "resumed runs find their rows by id"
    with pytest.raises(TrainingError, match=r"two rows have the id '81'.*name every file once"):
        read_conversations([files[0], files[0]])


@pytest.mark.parametrize("name", ["chatgpt", "GPT", "bot", "model", "Claude", " assistant "])
def test_speakers_of_other_names(tmp_path: Path, name: str) -> None:
    for key, text in (("from", "value"), ("from", "content")):
        chat = [{"from": "USER", "value": "Hi"}, {key: name, text: "Hello"}]
        (row,) = read_files(tmp_path, rows__jsonl=json.dumps({"conversations": chat}))
        assert [message["role"] for message in row.messages] == ["user", "assistant"]
        assert row.messages[1]["content"] == "Hello"
    mixed = [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]
    (row,) = read_files(tmp_path, rows__jsonl=json.dumps({"messages": mixed}))
    assert [message["role"] for message in row.messages] == ["user", "assistant"]


EMPTY_ROWS = ({"conversations": []}, {"messages": None}, {"prompt": ""}, {"text": " \n"}, {"turns": [""]},
              {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]},
              {"conversations": [{"from": "human", "value": " "}]}, {"prompt": [], "completion": []})  # fmt: skip


@pytest.mark.parametrize("empty", EMPTY_ROWS)
def test_an_empty_row_among_good_ones_is_left_out_and_told(tmp_path: Path, empty: dict[str, object]) -> None:
    file, told = tmp_path / "rows.jsonl", list[str]()
    file.write_text("\n".join(json.dumps(row) for row in ({"messages": CHAT}, empty, {"prompt": "Why?"})))
    assert [row.id for row in read_conversations([file], on_empty=told.append)] == ["rows-1", "rows-3"]
    assert told == [f"{file}, line 2"]
    file.write_text(json.dumps(empty))
    with pytest.raises(TrainingError, match="no conversations"):
        read_conversations([file])


@pytest.mark.parametrize("key", ["completion", "chosen"])
def test_a_prompt_of_messages_goes_on_in_its_completion(tmp_path: Path, key: str) -> None:
    (row,) = read_files(tmp_path, rows__jsonl=json.dumps({"prompt": CHAT[:1], key: CHAT[1:2], "rejected": CHAT[3:]}))
    assert list(row.messages) == CHAT[:2]
    (row,) = read_files(tmp_path, rows__jsonl=json.dumps({"prompt": CHAT[:1]}))
    assert list(row.messages) == CHAT[:1]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no file or folder"):
        read_conversations([tmp_path / "missing.jsonl"])
    with pytest.raises(TrainingError, match="'4' where prompts are wanted"):
        read_conversations(["4"])
    with pytest.raises(TrainingError, match=r"holds no \*\.jsonl"):
        read_conversations([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TrainingError, match="no conversations"):
        read_conversations([tmp_path])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(TrainingError, match="not UTF-8"):
        read_conversations([tmp_path / "latin.jsonl"])


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, UNMARKED])
def test_what_an_assistant_turn_adds_is_learned(tokenizer, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    assert learned(tokenizer, chat()) == "One costs 2 dollars.<|end|>10 dollars.<|end|>"


@pytest.mark.parametrize("learns_all", [False, True])
@pytest.mark.parametrize("form", ["plain history", "history rewritten"])
def test_turns_of_weight_0_are_never_learned(tokenizer, learns_all: bool, form: str) -> None:
    if form == "history rewritten":
        tokenizer.chat_template = THINKERS["unmarked"]
    messages = (CHAT[0], {**CHAT[1], "content": "why</think>One costs 2.", "weight": 0}, *CHAT[2:])
    for ids, mask in render_turns(tokenizer, replace(chat(), messages=messages), learns_all=learns_all):
        text = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
        assert "10 dollars.<|end|>" in text
        assert "One costs" not in text
        assert ("And five?" in text) == (learns_all and form == "plain history")
    (document,) = render_documents(
        [replace(chat(), messages=messages), replace(chat(), messages=messages[:2])], tokenizer, max_length=200
    ).documents
    assert document.id == "row-7", "the other row has nothing to learn from"


def test_a_template_that_renders_the_last_turn_otherwise(tokenizer) -> None:
    """What only a shorter conversation would show is not in the text, so it cannot be learned."""
    tokenizer.chat_template = FORGETFUL
    assert learned(tokenizer, chat()).endswith("Thinking. 10 dollars.<|end|>")


THINKERS = {  # reasoning stands in a turn while it is the last one, with and without marks; an end only at the end
    "unmarked": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "marked": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
THOUGHTS = (
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "first thought</think>Two."},
    {"role": "user", "content": "And?"}, {"role": "assistant", "content": "second thought</think>Ten."},
)  # fmt: skip


@pytest.mark.parametrize("form", THINKERS)
@pytest.mark.parametrize("answered", [False, True])
def test_every_turn_is_learned_as_it_was_written(tokenizer, form: str, answered: bool) -> None:
    """A template that rewrites history shows each turn once as it was written: when it is the last one."""
    tokenizer.chat_template = THINKERS[form]
    answer = (*tokenizer("second thought</think>Ten.")["input_ids"], tokenizer.eos_token_id) if answered else ()
    row = replace(chat(answer_ids=answer), messages=THOUGHTS)
    texts = []
    for ids, mask in render_turns(tokenizer, row):
        assert len(ids) == len(mask)
        texts.append((tokenizer.decode(ids), tokenizer.decode([t for t, on in zip(ids, mask, strict=True) if on])))
    (whole, last), (until_first, first) = texts
    assert "first thought" not in whole, "the conversation as it is served"
    assert last == "second thought</think>Ten.<|end|>"
    assert first == "first thought</think>Two.<|end|>"
    assert until_first.endswith(first)
    documents = render_documents([row], tokenizer, max_length=200).documents
    assert [document.id for document in documents] == ["row-7", "row-7, rewritten turn 1"]
    assert [document.written_from is not None for document in documents] == [answered, False]


@pytest.mark.parametrize("template", [None, UNMARKED, UNMARKED + "{{ '' if add_generation_prompt else '\n' }}"])
def test_history_that_stays_is_one_document(tokenizer, template: str | None) -> None:
    """Also where something is written behind the last turn alone."""
    tokenizer.chat_template = template or tokenizer.chat_template
    ((ids, mask),) = render_turns(tokenizer, chat())
    text = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
    assert text.rstrip() == "One costs 2 dollars.<|end|>10 dollars.<|end|>"


@pytest.mark.parametrize("template", [None, UNMARKED])
def test_a_chat_may_begin_with_the_assistant(tokenizer, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    assert learned(tokenizer, replace(chat(), messages=tuple(CHAT[1:]))).endswith("10 dollars.<|end|>")


def test_the_targets_own_ids_are_used_as_they_are(tokenizer) -> None:
    answer = [*tokenizer("1")["input_ids"], *tokenizer("0")["input_ids"], tokenizer.eos_token_id]
    ids, mask = render(tokenizer, chat(answer_ids=tuple(answer)))
    assert ids[-len(answer) :] == answer
    assert mask[-len(answer) :] == [True] * len(answer)
    earlier = tokenizer.decode([t for t, on in zip(ids[: -len(answer)], mask, strict=False) if on])
    assert earlier == "One costs 2 dollars.<|end|>"


def test_templates_and_rows_without_an_assistant_are_named(tokenizer) -> None:
    with pytest.raises(TrainingError, match="row-7 has no assistant turn"):
        render(tokenizer, replace(chat(), messages=tuple(CHAT[:1])))
    tokenizer.chat_template = ONLY_USERS
    with pytest.raises(TrainingError, match="row-7: the target's chat template renders no assistant turn"):
        render(tokenizer, chat())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TrainingError, match=r"row-7: .*roles must alternate"):
        render(tokenizer, chat())
    tokenizer.chat_template = None
    with pytest.raises(TrainingError, match=r"row-7 is a chat, but .* no chat template"):
        render(tokenizer, chat())


def test_long_conversations_are_counted(tokenizer) -> None:
    rows = [chat(), Conversation("short", "sums", tuple(CHAT[:2]))]
    length = len(render(tokenizer, rows[1])[0])
    cut = render_documents(rows, tokenizer, max_length=length)
    assert (cut.truncated, [len(d.input_ids) for d in cut.documents]) == (1, [length, length])
    with pytest.raises(TrainingError, match="no document is left"):
        render_documents(rows, tokenizer, max_length=4)
    everything = render_documents(rows, tokenizer, max_length=length, learns_all=True)
    assert everything.supervised_tokens == everything.tokens


def test_evaluation_prompts_end_with_an_early_user_message(tokenizer) -> None:
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(9))
    (prompt,) = evaluation_prompts([Conversation("long", "a", turns)], tokenizer)
    text = tokenizer.decode(prompt.input_ids)
    assert text.endswith("turn 4<|end|><|assistant|>")
    (alone,) = evaluation_prompts([Conversation("turns", "a", (turns[0], turns[2], turns[4]))], tokenizer)
    assert tokenizer.decode(alone.input_ids).endswith("turn 0<|end|><|assistant|>"), "the first is not answered yet"
    with pytest.raises(TrainingError, match="late has no user message"):
        evaluation_prompts([Conversation("late", "a", turns[1:2])], tokenizer)


# --- vocabulary -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(data=st.data(), vocab_size=st.integers(1, 40))
def test_vocabulary_keeps_the_most_frequent(data, vocab_size: int) -> None:
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=vocab_size, max_size=vocab_size)))
    size = data.draw(st.integers(1, vocab_size))
    ids = build_vocabulary(counts, size)
    assert (ids.diff() > 0).all()
    out = [i for i in range(vocab_size) if i not in ids.tolist()]
    assert max((int(counts[i]) for i in out), default=0) <= int(counts[ids].min())
    if counts.sum():
        assert coverage(counts, ids) == pytest.approx(counts[ids].sum().item() / counts.sum().item())
    assert coverage(counts, None) == (1.0 if counts.sum() else 0.0)


def test_only_supervised_tokens_are_counted() -> None:
    counts = count_supervised([Document("a", [1, 2, 2, 3], [False, True, True, False])], 5)
    assert counts.tolist() == [0, 0, 2, 0, 0]
    with pytest.raises(TrainingError, match="b holds token id 9"):
        count_supervised([Document("b", [1, 9], [True, True])], 5)
    with pytest.raises(ConfigurationError, match=r"wanted 1\.\.5"):
        build_vocabulary(counts, 6)
