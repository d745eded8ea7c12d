"""Prompts the target writes itself: asked for by count, kept, and learned from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_training import run_of, training

from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training import self_prompts
from eagle31_hf.training.self_prompts import FEWEST_AT_A_TIME, self_prompt_count, user_turn, write_prompts


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
