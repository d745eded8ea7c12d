"""Training data: what is learned of a row by which template, plain text, the draft vocabulary, packed rows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import CHAT, chat, run_of, training, writing
from torch.utils.data import default_collate

from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.serving import bodies
from eagle31_hf.texts.chats import encode_chat
from eagle31_hf.texts.rows import Conversation, conversation_from_row
from eagle31_hf.training.data import (
    Document,
    PackedDocuments,
    build_vocabulary,
    count_supervised,
    coverage,
    pack,
    render_documents,
    render_turns,
)
from eagle31_hf.training.measure import evaluation_prompts
from eagle31_hf.training.objectives import compute_features
from eagle31_hf.training.writing import regenerate
from families import recurrent_target
from helpers import random_drafter, random_prompts

ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
UNMARKED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + ASKS
THINKER = (  # reasoning stands in a turn while it is the last one
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}" + ASKS
)
TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content is defined and thinking %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "<|end|>{% endfor %}" + ASKS
)
TEMPLATES = {
    "its own": "",
    "unmarked": UNMARKED,
    "a line behind the last turn": UNMARKED + "{{ '' if add_generation_prompt else '\n' }}",
    # reasoning of earlier turns left out, as Qwen3's does
    "forgetful": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}Thinking. "
    "{% endif %}{{ m.content }}<|end|>{% endfor %}" + ASKS,
    "thinker": THINKER,
    "tools": TOOLS,
    "arguments joined": TOOLS.replace("call.function.arguments.city", "'' + call.function.arguments"),
    "none": None,
}
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
STORY = "Once upon a time there was a little boat that wanted to see the sea."
BOTH = "One costs 2 dollars.<|end|>10 dollars.<|end|>"


def row(**fields: Any) -> Conversation:
    return conversation_from_row(fields, where="row", fallback_id="r", category="c")


def turns(*texts: str, **first_answer: Any) -> Conversation:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    messages[1] |= first_answer
    return row(id="row-7", messages=messages)


THOUGHTS = ("One?", "first thought</think>Two.", "And?", "second thought</think>Ten.")
LATER = "second thought</think>Ten.<|end|>"


@pytest.fixture
def templated(tokenizer: Any, request: pytest.FixtureRequest) -> Any:
    tokenizer.chat_template = tokenizer.chat_template if request.param == "its own" else TEMPLATES[request.param]
    return tokenizer


def with_template(*names: str) -> Any:
    return pytest.mark.parametrize("templated", names, indirect=True)


def learned(tokenizer: Any, conversation: Conversation, **how: bool) -> list[str]:
    """Of each document that a conversation gives, what is learned."""
    rendered = render_turns(tokenizer, conversation, **how)
    assert all(len(ids) == len(mask) for ids, mask in rendered)
    return [tokenizer.decode([t for t, on in zip(ids, mask, strict=True) if on]) for ids, mask in rendered]


@pytest.mark.parametrize(
    ("templated", "conversation", "texts"),
    [
        ("its own", chat(), [BOTH]),
        ("unmarked", chat(), [BOTH]),
        ("a line behind the last turn", chat(), [BOTH]),
        ("unmarked", replace(chat(), messages=tuple(CHAT[1:])), ["<|assistant|>" + BOTH]),
        # Where the template rewrites history, each turn is learned as it was written.
        ("forgetful", chat(), ["Thinking. 10 dollars.<|end|>", "Thinking. One costs 2 dollars.<|end|>"]),
        ("thinker", turns(*THOUGHTS), [LATER, "first thought</think>Two.<|end|>"]),
        # A turn of weight 0 is never learned, nor what follows its other form.
        ("unmarked", turns(*THOUGHTS, weight=0), [LATER]),
        ("thinker", turns(*THOUGHTS, weight=0), [LATER]),
        ("tools", row(**TOOL_ROW), ["weather:Rome<|end|>(31 is much) Hot.<|end|>"]),
        ("tools", row(**TOOL_ROW | {"chat_template_kwargs": {"thinking": False}}), ["weather:Rome<|end|>Hot.<|end|>"]),
        # As a request to the server does; the data's are objects.
        ("arguments joined", row(**TOOL_ROW), ['weather:{"city": "Rome"}<|end|>(31 is much) Hot.<|end|>']),
        ("none", row(prompt=STORY, completion=" It swam."), [" It swam."]),
        ("none", row(prompt=STORY), [STORY]),
    ],
    indirect=["templated"],
)
def test_what_is_learned(templated: Any, conversation: Conversation, texts: list[str]) -> None:
    assert [text.rstrip() for text in learned(templated, conversation)] == [text.rstrip() for text in texts]


@with_template("thinker")
@pytest.mark.parametrize("answered", [False, True])
def test_a_turn_learned_apart_is_a_document_that_ends_with_it(templated: Any, answered: bool) -> None:
    answer = (*templated(THOUGHTS[3])["input_ids"], templated.eos_token_id) if answered else ()
    conversation = replace(turns(*THOUGHTS), answer_ids=answer)
    (whole, _), (apart, _) = render_turns(templated, conversation)
    assert "first thought" not in templated.decode(whole), "the conversation as it is served"
    assert templated.decode(apart).endswith("first thought</think>Two.<|end|>")
    documents, _ = render_documents([conversation], templated, max_length=200)
    assert [document.id for document in documents] == ["row-7", "row-7, rewritten turn 1"]
    assert [document.written_from is not None for document in documents] == [answered, False]


@with_template("unmarked", "thinker")
def test_all_is_learned_but_turns_of_weight_0(templated: Any) -> None:
    conversation = turns(*THOUGHTS, weight=0)
    (text,) = learned(templated, conversation, learns_all=True)
    assert text.endswith(LATER)
    assert "Two." not in text
    without = replace(conversation, messages=conversation.messages[:2])
    (document,), counts = render_documents([conversation, without], templated, max_length=200)
    assert counts["without anything to learn"] == 1
    assert document.id == "row-7", "the other row has nothing to learn from"


@with_template("tools")
def test_a_rows_tokens_are_those_that_serving_sends(templated: Any) -> None:
    body = bodies.parse(bodies.ChatBody, {**TOOL_ROW, "model": "m", "messages": TOOL_ROW["messages"][:3]})
    sent = encode_chat(templated, body.for_template, tools=body.offered, **body.chat_template_kwargs)
    ((ids, mask),) = render_turns(templated, row(**TOOL_ROW))
    assert ids[: len(sent)] == sent
    assert (mask[len(sent) - 1], mask[len(sent)]) == (False, True)
    assert '"name": "weather"' in templated.decode(sent)


@with_template("tools")
def test_results_of_calls_stay_with_their_calls(tmp_path: Path, target: Any, templated: Any) -> None:
    how = writing(max_new_tokens=5)
    rows, file = [row(**TOOL_ROW)], tmp_path / "c.jsonl"
    (written,) = regenerate(rows, target, templated, file, how)
    assert written.messages[:3] == row(**TOOL_ROW).messages[:3]
    assert written.messages[3]["content"] != "Hot."
    assert (written.tools, written.template_kwargs) == ((WEATHER,), {"thinking": True})
    assert regenerate(rows, target, templated, file, how) == [written], "from the file"
    ((ids, _),) = render_turns(templated, written)
    assert ids[-len(written.answer_ids) :] == list(written.answer_ids)


def test_the_targets_own_ids_are_used_as_they_are(tokenizer: Any) -> None:
    answer = [*tokenizer("1")["input_ids"], *tokenizer("0")["input_ids"], tokenizer.eos_token_id]
    ((ids, mask),) = render_turns(tokenizer, chat(answer_ids=tuple(answer)))
    assert ids[-len(answer) :] == answer
    assert learned(tokenizer, chat(answer_ids=tuple(answer))) == ["One costs 2 dollars.<|end|>10<|end|>"]
    assert all(mask[-len(answer) :])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (UNMARKED, CHAT[:1], "row-7 has no assistant turn"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", CHAT, "renders no assistant turn"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "row-7: .*roles must alternate"),
        (None, CHAT, "row-7 is a chat, but .* no chat template"),
    ],
)
def test_templates_and_rows_without_an_assistant_are_named(
    tokenizer: Any, template: str | None, messages: list[dict[str, str]], message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TrainingError, match=message):
        render_turns(tokenizer, replace(chat(), messages=tuple(messages)))


def test_long_conversations_are_counted(tokenizer: Any) -> None:
    rows = [chat(), Conversation("short", "sums", tuple(CHAT[:2]))]
    length = len(render_turns(tokenizer, rows[1])[0][0])
    documents, counts = render_documents(rows, tokenizer, max_length=length)
    assert (counts["truncated"], [len(each.input_ids) for each in documents]) == (1, [length, length])
    with pytest.raises(TrainingError, match="no document is left"):
        render_documents(rows, tokenizer, max_length=4)
    everything, _ = render_documents(rows, tokenizer, max_length=length, learns_all=True)
    assert all(all(each.loss_mask) for each in everything)


def test_evaluation_prompts_end_with_an_early_user_message(tokenizer: Any) -> None:
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(9))
    (prompt,) = evaluation_prompts([Conversation("long", "a", turns)], tokenizer)
    assert tokenizer.decode(prompt.input_ids).endswith("turn 4<|end|><|assistant|>")
    with pytest.raises(TrainingError, match="late has no user message"):
        evaluation_prompts([Conversation("late", "a", turns[1:2])], tokenizer)


@with_template("none")
@pytest.mark.parametrize("form", ["text", "prompt"])
def test_a_base_model_continues_a_prompt_or_half_of_a_text(
    tmp_path: Path, target: Any, templated: Any, form: str
) -> None:
    (written,) = regenerate([row(**{form: STORY})], target, templated, tmp_path / "c.jsonl", writing())
    opening = templated(STORY)["input_ids"]
    opening = opening[: len(opening) // 2] if form == "text" else opening
    answer = list(written.answer_ids)
    ((ids, mask),) = render_turns(templated, written)
    assert ids == opening + answer
    assert mask == [form == "text"] * len(opening) + [True] * len(answer)
    assert evaluation_prompts([row(**{form: STORY})], templated)[0].input_ids == opening


@with_template("thinker")
def test_what_was_left_out_or_learned_apart_is_said(tmp_path: Path, target: Any, templated: Any) -> None:
    rows, said = tmp_path / "rows.json", io.StringIO()
    messages = list(turns(*THOUGHTS).messages)
    rows.write_text(json.dumps([{"messages": messages}, {"messages": []}, *[{"messages": messages}] * 4]))
    told = training(rows, tmp_path / "out", max_length=64, regenerate="none")
    documents, _ = run_of(told, target, templated, said).read_texts()
    assert f"1 without any text left out, the first: {rows}, row 2" in " ".join(said.getvalue().split())
    assert "4 conversations and 4 turns that the template rewrites later" in said.getvalue(), said.getvalue()
    assert len(documents) == 8


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


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_packing_keeps_every_document_whole(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 20, seed=seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 20 for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // 20)
    assert pack(lengths, 20, seed=seed) == rows


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "nemotron_h", "lfm2"])
def test_packed_documents_do_not_see_each_other(family: str, target, drafter) -> None:
    """Neither by attention nor in recurrent states."""
    if family != "llama":
        target = recurrent_target(family)
        drafter = random_drafter(target, aux_layers=[1, 2, 3])
    texts = random_prompts(4, target.config.vocab_size - 10, longest=9)
    documents = [Document(str(number), ids, [True] * len(ids)) for number, ids in enumerate(texts)]
    data = PackedDocuments(documents, 16, seed=1)
    rows = default_collate(list(data))
    packed = compute_features(drafter.binding, rows["input_ids"], rows["position_ids"])
    for index, numbers in enumerate(data.rows):
        start = 0
        for number in numbers:
            ids = torch.tensor([documents[number].input_ids])
            alone = compute_features(drafter.binding, ids, torch.arange(ids.shape[1])[None])
            at = slice(start, start + ids.shape[1])
            assert torch.allclose(packed.logits[index, at], target(ids).logits[0], atol=1e-3)
            assert torch.allclose(packed.aux[index, at], alone.aux[0], atol=1e-3)
            start += ids.shape[1]
    assert max(map(len, data.rows)) > 1
