"""Prompts the target writes itself: what is kept of them, and that a drafter comes of nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from chat_rows import run_of
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.demo import target_path
from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.self_prompts import FEWEST_AT_A_TIME, is_new, self_prompt_count, user_turn, write_prompts
from eagle31_hf.training.settings import TrainingSettings

# --- what is kept -----------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["how", "do", "the", "apples", "fall", "write", "a", "poem", "on", "rain", "7"])
TEXTS = st.lists(st.lists(WORDS, max_size=30).map(" ".join), max_size=30)


@given(texts=TEXTS)
def test_what_is_kept_is_new(texts: list[str]) -> None:
    seen: set[tuple[str, ...]] = set()
    kept = [text for text in texts if is_new(text, seen)]
    assert all(text.split() for text in kept)
    assert len({tuple(text.split()) for text in kept}) == len(kept)
    assert not any(is_new(text, seen) for text in kept), "nothing is kept twice"
    assert not is_new(" ".join(["to be"] * 20), seen), "nor what repeats itself"


@pytest.mark.parametrize(
    ("text", "like_it"),
    [
        *[(text, text) for text in (
            "What is the capital of France?",
            "Solve [6x + 9] - 3*y + 6*2 = 15 - 2*y + 4y + 7x - 25 for x.",
            "def int_array_add(a, b):\n    return a + b",
            "Напишите рассказ о море и о ветре",
            "Schreiben Sie bitte einen Aufsatz zur Geschichte der Stadt Köln und ihrer Brücken",
            "夏休みの思い出について書いてください",
            "เขียนเรื่องสั้นเกี่ยวกับทะเล",
            "Python으로 정렬 함수를 작성해 주세요",
            "اكتب قصة قصيرة عن البحر",
        )],
        ("How do I bake a loaf of bread at home on a stone?", "How do I bake a loaf of bread at home on a tray?"),
        ("请写一首关于秋天的落叶和思念的诗歌", "请写一首关于秋天的落叶和思念的短诗"),
    ],
)  # fmt: skip
def test_prompts_of_any_language_and_code_are_kept_and_none_like_them(text: str, like_it: str) -> None:
    seen: set[tuple[str, ...]] = set()
    assert is_new(text, seen)
    assert not is_new(like_it, seen)


# --- writing ----------------------------------------------------------------------------------------------------------


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


def test_the_target_writes_distinct_prompts_and_goes_on_after_a_kill(tmp_path: Path, target, tokenizer) -> None:
    file = tmp_path / "data" / "prompts.jsonl"

    def write(count: int, seed: int = 0) -> list[Conversation]:
        return write_prompts(target, tokenizer, file, count, write_rows=8, seed=seed, max_new_tokens=40)

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


def test_a_target_with_nothing_to_say_is_told(tmp_path: Path, target, tokenizer) -> None:
    with pytest.raises(TrainingError, match=r"\d of the target's prompts can be used"):
        write_prompts(target, tokenizer, tmp_path / "p.jsonl", 3, write_rows=4, max_new_tokens=1)


def test_self_written_and_given_prompts_are_learned_from_together(tmp_path: Path, target, tokenizer) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "prompt": f"I need {i} tickets."}) for i in range(6)))
    told = TrainingSettings(
        target=str(target_path()), prompts=("self:9", str(rows)), out=tmp_path / "out", max_new_tokens=8,
        max_length=96, write_rows=8, temperature=(0.0,),
    )  # fmt: skip
    log = io.StringIO()
    run = run_of(told, target, tokenizer, log)
    documents, prompts = run.read_texts()
    ids = {document.id for document in documents}
    assert len(ids) + len(prompts) == 15
    assert any(name.startswith("self-") for name in ids)
    assert any(name.startswith("r") for name in ids)
    assert "the target writes prompts: 9 of 9 in" in log.getvalue()
    assert "the target writes answers: 12 of 12 in" in log.getvalue()
