"""The rows people have: tools and their calls, null and listed content, reasoning, template options, plain text."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from chat_rows import render, run_of, writing

from eagle31_hf.demo import target_path
from eagle31_hf.texts.chats import encode_chat
from eagle31_hf.texts.rows import Conversation, conversation_from_row
from eagle31_hf.training.measure import evaluation_prompts
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.writing import regenerate

TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content is defined and thinking %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL_ROW = {
    "id": "tools",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "31 degrees", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Hot.", "reasoning_content": "31 is much"},
    ],
    "tools": [WEATHER],
    "chat_template_kwargs": {"thinking": True},
}


@pytest.fixture
def tool_tokenizer(tokenizer):
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


@pytest.fixture
def base_tokenizer(tokenizer):
    tokenizer.chat_template = None
    return tokenizer


def row(**fields: Any) -> Conversation:
    return conversation_from_row(fields, where="row", fallback_id="r", category="c")


def learned(tokenizer, conversation: Conversation) -> str:
    ids, mask = render(tokenizer, conversation)
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


def test_calls_and_reasoning_are_rendered_and_learned(tool_tokenizer) -> None:
    ids, _ = render(tool_tokenizer, row(**TOOL_ROW))
    assert '"name": "weather"' in tool_tokenizer.decode(ids)
    assert learned(tool_tokenizer, row(**TOOL_ROW)) == "weather:Rome<|end|>(31 is much) Hot.<|end|>"
    silent = row(**{**TOOL_ROW, "chat_template_kwargs": {"thinking": False}})
    assert learned(tool_tokenizer, silent) == "weather:Rome<|end|>Hot.<|end|>"


def test_a_template_that_joins_arguments_to_text_gets_them_as_json(tool_tokenizer) -> None:
    """As a request to the server does; the data's are objects."""
    tool_tokenizer.chat_template = TOOL_TEMPLATE.replace("call.function.arguments.city", "'' + call.function.arguments")
    assert learned(tool_tokenizer, row(**TOOL_ROW)).startswith('weather:{"city": "Rome"}<|end|>')


def test_a_rows_tokens_are_those_that_serving_sends(tool_tokenizer) -> None:
    bodies = pytest.importorskip("eagle31_hf.serving.bodies")
    body = bodies.parse_chat({**TOOL_ROW, "model": "m", "messages": TOOL_ROW["messages"][:3]})
    sent = encode_chat(tool_tokenizer, body.for_template, tools=body.offered, **body.chat_template_kwargs)
    ids, mask = render(tool_tokenizer, row(**TOOL_ROW))
    assert ids[: len(sent)] == sent
    assert not mask[len(sent) - 1]
    assert mask[len(sent)]


def test_results_of_calls_stay_with_their_calls(tmp_path: Path, target, tool_tokenizer) -> None:
    how = writing(max_new_tokens=5)
    (written,) = regenerate([row(**TOOL_ROW)], target, tool_tokenizer, tmp_path / "c.jsonl", how)
    assert written.messages[:3] == row(**TOOL_ROW).messages[:3]
    assert written.messages[3]["content"] != "Hot."
    assert (written.tools, written.template_kwargs) == ((WEATHER,), {"thinking": True})
    again = regenerate([row(**TOOL_ROW)], target, tool_tokenizer, tmp_path / "c.jsonl", how)
    assert again == [written], "read from the file"
    ids, mask = render(tool_tokenizer, written)
    assert ids[-len(written.answer_ids) :] == list(written.answer_ids)
    assert "weather:Rome" in tool_tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])


# --- base models ------------------------------------------------------------------------------------------------------

STORY = "Once upon a time there was a little boat that wanted to see the sea."


def test_plain_text_is_continued_from_its_middle(tmp_path: Path, target, base_tokenizer) -> None:
    how = writing(regenerate="last")
    (written,) = regenerate([row(text=STORY)], target, base_tokenizer, tmp_path / "c.jsonl", how)
    whole = base_tokenizer(STORY)["input_ids"]
    ids, mask = render(base_tokenizer, written)
    half = len(whole) // 2
    assert ids == whole[:half] + list(written.answer_ids)
    assert all(mask)
    assert evaluation_prompts([row(text=STORY)], base_tokenizer)[0].input_ids == whole[:half]


def test_a_prompt_is_continued_and_what_follows_is_learned(tmp_path: Path, target, base_tokenizer) -> None:
    how = writing()
    (written,) = regenerate([row(prompt=STORY)], target, base_tokenizer, tmp_path / "c.jsonl", how)
    prompt = base_tokenizer(STORY)["input_ids"]
    ids, mask = render(base_tokenizer, written)
    assert ids == prompt + list(written.answer_ids)
    assert mask == [False] * len(prompt) + [True] * len(written.answer_ids)
    assert render(base_tokenizer, row(prompt=STORY)) == (prompt, [True] * len(prompt)), "as it is"
    assert learned(base_tokenizer, row(prompt=STORY, completion=" It swam.")) == " It swam."


@pytest.mark.parametrize("regenerate_turns", ["last", "each", "none"])
@pytest.mark.parametrize("form", ["text", "prompt"])
def test_a_base_model_learns_from_either_kind_of_row(
    tmp_path: Path, target, base_tokenizer, form: str, regenerate_turns: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", form: f"{STORY} It was boat {i}."}) for i in range(6)))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), out=tmp_path / "out", max_new_tokens=4, max_length=64,
        regenerate=regenerate_turns, temperature=(0.0,),
    )  # fmt: skip
    run = run_of(told, target, base_tokenizer)
    documents, prompts = run.read_texts()
    assert (len(documents.documents), len(prompts)) == (5, 1)
    assert documents.supervised_tokens > 0


THINKER = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_what_was_left_out_or_learned_apart_is_said(tmp_path: Path, target, tokenizer) -> None:
    tokenizer.chat_template = THINKER
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "One?"), ("assistant", "a</think>Two."), ("user", "And?"), ("assistant", "b"))
    ]
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"messages": turns}, {"messages": []}, *[{"messages": turns}] * 4]))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), out=tmp_path / "out", max_length=64, regenerate="none",
    )  # fmt: skip
    said = io.StringIO()
    documents, _ = run_of(told, target, tokenizer, said).read_texts()
    assert f"1 without any text left out, the first: {rows}, row 2" in " ".join(said.getvalue().split())
    assert "4 conversations and 4 turns that the template rewrites later" in said.getvalue(), said.getvalue()
    assert len(documents.documents) == 8
