"""Texts the target writes to train on: turns, temperatures, going on after a kill; prompts that it writes itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tiny_training import CHAT, chat, run_of, training, writing

from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training import self_prompts
from eagle31_hf.training.data import render_documents
from eagle31_hf.training.preparation import resolve
from eagle31_hf.training.self_prompts import FEWEST_AT_A_TIME, self_prompt_count, user_turn, write_prompts
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


# --- prompts that it writes itself ------------------------------------------------------------------------------------


def test_how_many_prompts_a_source_asks_for() -> None:
    assert [self_prompt_count(source) for source in ("self", "self:7", "selfish.jsonl", "a:7")] == [2000, 7, None, None]
    for source in ("self:0", "self:-3", "self:many"):
        with pytest.raises(ConfigurationError, match="wanted self or self:N"):
            self_prompt_count(source)


def test_the_templates_own_opening_of_a_user_turn(tokenizer) -> None:
    opening, closing = user_turn(tokenizer, "Be brief.")
    asked = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert opening + "Why?" + closing == asked


def test_templates_that_cannot_ask_are_told(tokenizer, monkeypatch) -> None:
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", no_system)
    assert user_turn(tokenizer, "Be brief.") == user_turn(tokenizer, None), "asked without a system prompt"
    for template, message in (
        (None, r'no chat template.*rows \{"text"'),
        ("nothing", "does not show the user's words"),
        ("{{ raise_exception('never') }}", "refuses a lone user message"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(TrainingError, match=message):
            user_turn(tokenizer, None)


def test_the_target_writes_distinct_prompts_and_goes_on_after_a_kill(
    tmp_path: Path, target, tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(self_prompts, "MOST_TOKENS", 40)
    file = tmp_path / "data" / "prompts.jsonl"

    def write(count: int, seed: int = 0) -> list[Conversation]:
        return write_prompts(target, tokenizer, file, count, write_rows=8, seed=seed)

    whole = write(10)
    assert [row.id for row in whole] == [f"self-{number}" for number in range(10)]
    texts = [row.messages[0]["content"] for row in whole]
    assert all(row.messages == ({"role": "user", "content": text},) for row, text in zip(whole, texts, strict=True))
    assert len(set(texts)) == 10
    assert not any("<|" in text for text in texts), "the words alone, no mark of the template"
    batches = [json.loads(line)["batch"] for line in file.read_text().splitlines()]
    content = file.read_bytes()
    first = sum(batch == batches[0] for batch in batches)
    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:first]) + lines[first][:9])  # killed in the middle of a line
    assert write(10) == whole
    assert write(4) == whole[:4], "what is there is enough"
    assert write(4, seed=1) != whole[:4], "by another seed others are written"
    assert write(10) == whole


def test_no_more_is_written_than_is_wanted(tmp_path: Path, target, tokenizer, monkeypatch) -> None:
    sizes, generate = [], target.generate
    monkeypatch.setattr(
        target, "generate", lambda **kwargs: sizes.append(len(kwargs["input_ids"])) or generate(**kwargs)
    )
    write_prompts(target, tokenizer, tmp_path / "p.jsonl", 3)
    assert max(sizes) == FEWEST_AT_A_TIME


def test_a_target_with_nothing_to_say_is_told(tmp_path: Path, target, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(self_prompts, "MOST_TOKENS", 1)
    with pytest.raises(TrainingError, match=r"\d of the target's prompts can be used"):
        write_prompts(target, tokenizer, tmp_path / "p.jsonl", 3, write_rows=4)


def test_self_written_and_given_prompts_are_learned_from_together(tmp_path: Path, target, tokenizer) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "prompt": f"I need {i} tickets."}) for i in range(6)))
    told = training(rows, tmp_path / "out", max_new_tokens=8, max_length=96, write_rows=8, temperature=(0.0,))
    log = io.StringIO()
    run = run_of(replace(told, prompts=("self:9", *told.prompts)), target, tokenizer, log)
    documents, prompts = run.read_texts()
    ids = {document.id for document in documents}
    assert len(ids) + len(prompts) == 15
    assert any(name.startswith("self-") for name in ids)
    assert any(name.startswith("r") for name in ids)
    assert "the target writes prompts: 9 of 9 in" in log.getvalue()
    assert "the target writes answers: 12 of 12 in" in log.getvalue()
