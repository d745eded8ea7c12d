"""Training data: masks by template, the draft vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chat_rows import CHAT, chat, render
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.errors import ConfigurationError, TrainingError
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


# --- masks ------------------------------------------------------------------------------------------------------------


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
def test_what_an_assistant_turn_adds_is_learned(tokenizer, template: str | None) -> None:
    """In one document where history stays as it is, also where something is written behind the last turn alone."""
    tokenizer.chat_template = template or tokenizer.chat_template
    assert len(render_turns(tokenizer, chat())) == 1
    assert learned(tokenizer, chat()).rstrip() == "One costs 2 dollars.<|end|>10 dollars.<|end|>"
    begun_by_assistant = replace(chat(), messages=tuple(CHAT[1:]))
    assert learned(tokenizer, begun_by_assistant).rstrip().endswith("10 dollars.<|end|>")


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
