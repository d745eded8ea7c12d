"""Texts the target writes to train on: turns, temperatures, and going on after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tiny_training import CHAT, chat, training, writing

from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.data import render_documents
from eagle31_hf.training.preparation import resolve
from eagle31_hf.training.writing import RowToWrite, batches, keys_of, regenerate, write_batch
from helpers import CONFIGS, random_target


def conversations(count: int) -> list[Conversation]:
    return [replace(chat(), id=f"row-{i}", messages=tuple(CHAT[: 2 + 2 * (i % 2)])) for i in range(count)]


def test_the_target_writes_every_turn_after_its_own_turns(tmp_path: Path, target, tokenizer) -> None:
    how = writing(max_new_tokens=12, write_rows=3)
    written = regenerate(conversations(4), target, tokenizer, tmp_path / "c.jsonl", how)
    assert [c.id for c in written] == ["row-0", "row-1", "row-2", "row-3"]
    for row in written:
        prompt = tokenizer.apply_chat_template(
            list(row.messages[:-1]), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        plain = target.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
        assert list(row.answer_ids) == plain.tolist()
        assert row.messages[-1]["content"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert CHAT[1]["content"] not in [message["content"] for message in row.messages]
    cut = regenerate(conversations(2), target, tokenizer, tmp_path / "cut.jsonl", writing(max_new_tokens=1))
    assert [len(row.messages) for row in cut] == [2, 2], "an answer that was cut ends its conversation"


def test_writing_goes_on_after_a_kill(tmp_path: Path, target, tokenizer, monkeypatch) -> None:
    how = writing(regenerate="last", write_rows=2)
    file = tmp_path / "c.jsonl"
    rows = conversations(5)
    whole = regenerate(rows, target, tokenizer, file, how)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.7)])  # in the middle of a line
    kept = file.read_bytes().count(b"\n")
    folder = Path(target.name_or_path)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(target, "name_or_path", folder.name)  # the same target, started from elsewhere
    calls: list[tuple[int, float]] = []
    again = regenerate(rows, target, tokenizer, file, how, on_progress=lambda *call: calls.append(call))
    assert again == whole
    assert calls[0] == (kept, 0.0)
    assert sum(ended for ended, _ in calls) == 5
    assert any(0 < underway < 1 for _, underway in calls), "the bar moves with tokens"
    longer = regenerate(rows, target, tokenizer, file, replace(how, max_new_tokens=7))
    assert {len(row.answer_ids) for row in longer} == {7}, "by other settings they are written anew"
    assert regenerate(rows, target, tokenizer, file, how) == whole, "and the others stay"


def test_no_beams_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the target's generation config says: no drafter serves them."""
    target, prompts = random_target(CONFIGS["qwen3"]()), [[3, 4, 5], [6, 7, 8, 9]]
    plain = write_batch(target, prompts, seed=0, max_new_tokens=12)
    monkeypatch.setattr(target.generation_config, "num_beams", 3)
    assert write_batch(target, prompts, seed=0, max_new_tokens=12) == plain


def test_rows_are_known_by_what_they_ask(tmp_path: Path, target, tokenizer) -> None:
    """A file may be edited between a stop and `--resume`: ids by line then name other rows."""
    how = writing(regenerate="last")
    file = tmp_path / "c.jsonl"
    rows = [replace(chat(), id=f"f-{i}", messages=({"role": "user", "content": f"I need {i} beds."},)) for i in (1, 2)]
    first = regenerate(rows, target, tokenizer, file, how)
    new = replace(rows[0], messages=({"role": "user", "content": "A taxi, please."},))
    moved = [new, *(replace(row, id=f"f-{i}") for i, row in enumerate(rows, 2))]  # one line put in front
    counts: list[int] = []
    again = regenerate(moved, target, tokenizer, file, how, on_progress=lambda ended, _: counts.append(ended))
    assert counts[0] == 2, "both rows are kept"
    assert [row.id for row in again] == ["f-1", "f-2", "f-3"]
    assert again[0].messages[0]["content"] == "A taxi, please."
    assert [row.answer_ids for row in again[1:]] == [row.answer_ids for row in first]


def test_several_temperatures_share_the_conversations(tmp_path: Path, target, tokenizer) -> None:
    rows = conversations(12)
    how = writing(regenerate="last", temperature=(0.0, 5.0, 0.0), max_new_tokens=8)
    drawn = [RowToWrite.of(row, key, how) for row, key in zip(rows, keys_of(rows), strict=True)]
    found = batches(drawn, 3)
    assert sorted(row.conversation.id for batch in found for row in batch) == sorted(row.id for row in rows), (
        "each once"
    )
    assert all(len({row.temperature for row in batch}) == 1 for batch in found)
    assert [len(batch) for batch in found].count(3) >= 2
    for temperature in (0.0, 5.0):
        lengths = [row.length for batch in found for row in batch if row.temperature == temperature]
        assert lengths == sorted(lengths, reverse=True), "beside its like, the longest first"
    written = regenerate(rows, target, tokenizer, tmp_path / "mixed.jsonl", how)
    greedy = regenerate(rows, target, tokenizer, tmp_path / "greedy.jsonl", replace(how, temperature=(0.0,)))
    same = [one.answer_ids == other.answer_ids for one, other in zip(written, greedy, strict=True)]
    assert same == [row.temperature == 0 for row in drawn]
    assert [row.answer_temperature for row in written] == [row.temperature for row in drawn]
    (document, *_), _ = render_documents(written, tokenizer, max_length=200)
    assert document.temperature == written[0].answer_temperature
    assert document.input_ids[document.written_from :] == list(written[0].answer_ids)
    assert {True, False} == set(same), "both kinds are there"


def test_a_target_that_says_nothing_of_sampling_writes_both_ways(tmp_path: Path, target) -> None:
    told = training("x.jsonl", tmp_path)
    assert resolve(told, target).temperature == (0.0, 1.0)
    assert resolve(replace(told, temperature=(0.6,)), target).temperature == (0.6,)
    with mock.patch.multiple(target.generation_config, do_sample=True, temperature=0.7):
        assert resolve(told, target).temperature == (0.7,), "as its generation config says"


def test_contexts_that_are_too_long_are_left_out(tmp_path: Path, target, tokenizer) -> None:
    how = writing(max_length=11)
    assert regenerate(conversations(2), target, tokenizer, tmp_path / "c.jsonl", how) == [None, None]
