"""Fields of requests: what is read reaches the text, what is not is named, what is wrong or would change the text is
refused in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
import re

import pytest

from eagle31_hf.serving.api import Translator
from eagle31_hf.serving.api_errors import ApiError
from eagle31_hf.serving.bodies import REFUSED, ChatBody, CompletionBody, parse, parse_json
from loopback import HTTP, MESSAGES, MODEL, QUESTION, TOOL_TEMPLATE, chat, error_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
READ = {
    "messages": [{"role": "user", "content": "Hm?"}], "n": 2, "stop": ["x"], "seed": 3, "max_tokens": 7,
    "max_completion_tokens": 8, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
    "typical_p": 0.4, "frequency_penalty": 1, "repetition_penalty": 1.5, "logit_bias": {"5": 0.5}, "logprobs": True,
    "ignore_eos": True, "min_tokens": 4, "stop_token_ids": [9],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "structured_outputs": {"regex": "a+"},
    "tools": [TOOL],
    "response_format": {"type": "json_object"}, "chat_template_kwargs": {"shouts": True}, "reasoning_effort": "low",
}  # fmt: skip
OF_THE_CALL = {"model", "stream", "stream_options", "tool_choice", "top_logprobs", "parallel_tool_calls"}
"""Read by other tests."""
TEMPLATE = TOOL_TEMPLATE + "{% if shouts %}!{% endif %}{{ reasoning_effort }}"


@pytest.fixture
def texts_of(served, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    translator = Translator(served.engine)
    return lambda **more: translator.texts_of(parse(ChatBody, {"model": MODEL, "messages": MESSAGES, **more}))


@pytest.mark.parametrize("name", list(READ))
def test_a_field_that_is_read_reaches_the_text(texts_of, name):
    if name.startswith(("structured", "response")):
        pytest.importorskip("llguidance")
    assert texts_of(**{name: READ[name]}) != texts_of()


def test_completions_are_tokenized_as_they_ask(served):
    translator, asked = Translator(served.engine), []
    translator._tokenizer = lambda text, *, add_special_tokens: asked.append(add_special_tokens) or {"input_ids": [5]}
    for more in ({"add_special_tokens": False}, {}):
        translator.texts_of(parse(CompletionBody, {"prompt": "A shop", **more}))
    assert asked == [False, True]


def test_a_limit_of_minus_one_is_none(served, texts_of):
    """llama.cpp's and LM Studio's clients send it."""
    completion = parse(CompletionBody, {"prompt": [5], "max_tokens": -1})
    texts = [
        *texts_of(max_tokens=-1),
        *texts_of(max_completion_tokens=-1),
        *Translator(served.engine).texts_of(completion),
    ]
    assert {text.longest for text in texts} == {served.engine.settings.context}


# --- what is wrong ----------------------------------------------------------------------------------------------------

WRONG = {
    "messages": "hi", "n": 1.5, "stop": [5], "seed": "one", "max_tokens": [], "max_completion_tokens": "many",
    "temperature": "hot", "top_p": {}, "top_k": 2.5, "min_p": "none", "presence_penalty": [], "typical_p": 7,
    "frequency_penalty": "x", "repetition_penalty": "x", "logit_bias": {"x": 1}, "logprobs": "maybe",
    "ignore_eos": "no", "min_tokens": 1.5, "stop_token_ids": ["x"],
    "include_stop_str_in_output": 3, "skip_special_tokens": "x", "structured_outputs": [1],
    "tools": [{"type": "function"}],
    "response_format": "json", "chat_template_kwargs": [], "reasoning_effort": 5, "model": 5, "stream": "yes",
    "stream_options": 5, "tool_choice": "perhaps", "top_logprobs": "x", "parallel_tool_calls": "x",
}  # fmt: skip

OF_COMPLETIONS = {"prompt": {"text": "x"}, "logprobs": "two", "echo": "yes", "add_special_tokens": 1, "max_tokens": -2}


def test_all_fields_are_tried():
    assert set(READ) | OF_THE_CALL == set(WRONG) == set(ChatBody.model_fields)
    assert set(CompletionBody.model_fields) - set(WRONG) <= set(OF_COMPLETIONS)


@pytest.mark.parametrize(
    ("path", "body", "name", "value"),
    [("chat/completions", {"messages": MESSAGES}, *each) for each in WRONG.items()]
    + [("completions", {"prompt": "A shop"}, *each) for each in OF_COMPLETIONS.items()],
)
def test_a_wrong_type_is_named(served, path, body, name, value):
    told = HTTP.post(f"{served.url}/v1/{path}", json={"model": MODEL, **body, **HABITS, name: value})
    assert (told.status_code, re.split(r"[.[]", told.json()["error"]["param"])[0]) == (400, name), told.text
    assert name in told.json()["error"]["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BANANA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}
TOO_LONG = "this model's maximum context length is 512 tokens"


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model": "other"}, "model_not_found", "'demo' is"),
        ({"messages": None}, "missing_required_parameter", "messages is missing"),
        ({"messages": []}, "array_below_min_length", "messages: got []; wanted at least 1 of them"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "wizard"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "invalid_value", "text"),
        ({"temperature": 3}, "decimal_above_max_value", "temperature: got 3; wanted at most 2.0"),
        ({"temperature": 1e-6}, "decimal_below_min_value", "wanted 0 (greedy) or at least"),
        ({"temperature": "0.5"}, "invalid_type", 'temperature: got "0.5"; wanted a number'),
        ({"max_tokens": True}, "invalid_type", "max_tokens: got true; wanted a number"),
        ({"n": 1000}, "integer_above_max_value", "n:"),
        ({"max_tokens": 7, "max_completion_tokens": 8}, "invalid_parameter_combination",
         "got max_tokens 7 and max_completion_tokens 8; pass one"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens: got 0; wanted at least 1, or -1 for no limit"),
        ({"top_logprobs": 2}, None, "logprobs"),
        ({"stop": ["a"] * 99}, "array_above_max_length", "wanted at most 16 of them"),
        ({"stop": ""}, "string_below_min_length", 'stop: got ""; wanted some text'),
        ({"stop": [""]}, "string_below_min_length", 'stop[0]: got ""; wanted some text'),
        ({"stop": 5}, "invalid_type", "stop: got 5; wanted a string or an array"),
        ({"tool_choice": "perhaps", "tools": [TOOL]}, "invalid_value",
         'wanted "none", "auto" or "required" or an object'),
        ({"tool_choice": "required"}, None, "without tools"),
        ({"tools": [TOOL]}, None, "template has no place for tools"),
        ({"logit_bias": {"99999999": 1}}, None, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 5}, None, "min_tokens is 9, and 5"),
        ({"stop_token_ids": [10**6]}, None, "stop_token_ids: a token id is 1000000"),
        ({"messages": [{"role": "user", "content": "many words " * 400}]}, "context_length_exceeded", TOO_LONG),
        ({"max_tokens": 5000}, "context_length_exceeded", TOO_LONG),
        ({"prompt": "A shop", "max_tokens": 0}, None, "max_tokens is 0 without echo"),
        ({"prompt": ""}, None, "prompt is empty"),
        ({"guided_json": {"type": "object"}}, "unsupported_parameter",
         "guided_json was removed in 0.2.0: pass structured_outputs with json"),
        ({"bad_words": ["rain"]}, "unsupported_parameter",
         "bad_words was removed in 0.2.0: forbid tokens by a logit_bias"),
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_schema"}}, None, "response_format.json_schema"),
        ({"response_format": BANANA}, "invalid_schema", "banana"),
        ({"structured_outputs": {"json": {"type": "object"}, "regex": "a"}}, None,
         "json and structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "invalid_value", 'structured_outputs.json: got "{"; EOF'),
        ({"structured_outputs": {"regex": "("}}, "invalid_schema",
         "regex: this regular expression cannot be followed"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "invalid_schema",
         "grammar: this grammar cannot be followed"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "invalid_schema",
         "GBNF was removed in 0.2.0: write the grammar in Lark's"),
        ({"structured_outputs": {"choice": []}}, "array_below_min_length",
         "choice: got []; wanted at least 1 of them"),
        ({"num_beams": 4}, "unsupported_parameter",
         "num_beams would change the text and is not served; texts are drawn or greedy"),
        ({"structured_outputs": {"jsn": {}}}, "unsupported_parameter",
         "structured_outputs.jsn: got {}; wanted a field that is served"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, None,
         "follow one of them"),
    ],
)  # fmt: skip
def test_bad_input_is_told_what_is_wrong_and_the_server_goes_on(served, client, fields, code, says):
    """By OpenAI's name for it."""
    if set(fields) & {"response_format", "structured_outputs"}:
        pytest.importorskip("llguidance")
    path = "completions" if "prompt" in fields else "chat/completions"
    asks = {} if "prompt" in fields else {"messages": MESSAGES}
    told = HTTP.post(f"{served.url}/v1/{path}", json={"model": MODEL, **asks, **fields})
    error = told.json()["error"]
    assert (told.status_code, error["code"]) == (404 if code == "model_not_found" else 400, code)
    message = error["message"]
    assert says in message, message
    assert not re.search("Input should|Value error|validation", message), "words of pydantic"
    assert not re.search(r"\b(True|None|str|list|dict)\b", message), "words of Python"
    assert chat(client, max_tokens=2).choices[0].message.content


JSON = "application/json"


@pytest.mark.parametrize(
    ("body", "kind", "status", "code", "says"),
    [
        *((body, JSON, 400, "invalid_json", "the body is no JSON: ") for body in (
            b"{", b"[" * 100_000, b"\xff", b'{"prompt": "x \\ud83d y"}', b'{"tools": [{"\\ud83d": 1}]}',
            b'{"messages": [{"role": "user", "content": "x\\udf36"}]}', b'{"\\ud83d": 1}',
        )),
        *((body, JSON, 400, "invalid_json", f"JSON of type {name}; wanted an object") for body, name in (
            (b"[]", "array"), (b'"x"', "string"), (b"true", "boolean"), (b"1", "integer"),
        )),
        (b"{}", "text/plain", 415, "unsupported_media_type", ""),
        (b"{}", JSON, 400, "missing_required_parameter", ""),
        (b" " * (9 * 2**20), JSON, 413, "body_too_large", ""),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request_get_an_error_in_openais_shape(served, body, kind, status, code, says):
    told = HTTP.post(f"{served.url}/v1/chat/completions", content=body, headers={"content-type": kind}, timeout=30)
    error = told.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (told.status_code, error["code"]) == (status, code)
    assert says in error["message"]


# --- what is not read -------------------------------------------------------------------------------------------------

HABITS = {
    "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "x",
    "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "x"}, "store": True,
    "reasoning_effort": "medium", "reasoning": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 9},
    "enable_thinking": True, "verbosity": "low", "web_search_options": {}, "moderation": "x", "request_id": "x",
    "cache_prompt": True, "id_slot": -1, "n_cache_reuse": 0, "n_keep": 0, "n_discard": 0, "min_keep": 0,
    "speculative.n_max": 5, "speculative.n_min": 1, "speculative.p_min": 0.5, "dynatemp_exponent": 1.0,
    "xtc_threshold": 0.1, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "guided_decoding_backend": "auto", "priority": 0, "cache_salt": "x",
    "add_special_tokens": False, "spaces_between_special_tokens": True, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "include_reasoning": True, "separate_reasoning": True,
    "reasoning_format": "auto", "thinking_token_budget": 100, "timings_per_token": True, "return_progress": False,
    "post_sampling_probs": False, "response_fields": [], "n_probs": 0, "prompt_logprobs": 1, "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1}, "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}, "return_tokens": True,
    "include_spec_decode_stats": True, "parse_tool_calls": True, "thinking_forced_open": False, "custom_id": "x",
    "extra_headers": {"a": "b"}, "truncation_side": "left", "ключ": 1,
}  # fmt: skip
IDLE = {
    name: neutral[0] if neutral else None for name, (_advice, *neutral) in REFUSED.items() if name != "functions"
}  # fmt: skip


def test_what_clients_send_by_habit_is_answered_and_named(served, pair, caplog):
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, **HABITS}
    assert len(HABITS) >= 60
    for _ in range(2):
        with caplog.at_level("INFO", "eagle31_hf.requests"):
            told = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
        assert told.json()["choices"][0]["message"]["content"] == pair.answer(QUESTION)
    one = HTTP.post(f"{served.url}/v1/chat/completions", json={**body, **dict.fromkeys(HABITS), "store": True})
    assert one.headers["x-ignored-fields"] == "store"
    assert caplog.text.count("store") == 1, "each is named once"
    named = {name.replace("ключ", "????") for name in HABITS}
    assert set(told.headers["x-ignored-fields"].split(", ")) == named


def test_what_asks_for_nothing_is_let_through(served):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, **IDLE, "suffix": "", "tools": None}
    assert HTTP.post(f"{served.url}/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("name", [*REFUSED, "guided_json", "guided_structural_tag"])
def test_what_would_change_the_text_is_refused_by_name(served, name):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, name: "asks for something"}
    told = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert told.status_code == 400
    assert told.json()["error"]["param"] == name


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_no_other_is_offered(mode):
    other = {"type": "function", "function": {"name": "g"}}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]}
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL, other]}
    asked["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    body = parse(ChatBody, asked)
    assert body.offered == [other]
    assert body.forced == ([other] if mode == "required" else [])
    allowed["tools"][0]["function"]["name"] = "h"
    with pytest.raises(ApiError, match="names 'h'; the tools are f, g"):
        parse(ChatBody, asked)


# --- messages and tools -----------------------------------------------------------------------------------------------

CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_calls": None},
        {"function_call": None, "refusal": None, "audio": None, "annotations": []},
        {"content": None, "tool_calls": [CALLED]},
        {"content": None, "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"content": None, "tool_calls": [{**CALLED, "id": None, "function": {"name": "f", "arguments": None}}]},
        {"content": [{"type": "text", "text": "x"}], "reasoning": "Hm."},
    ],
)
def test_answers_come_back_as_clients_write_them(texts_of, changes):
    answer = {"role": "assistant", "content": "x", **changes}
    assert texts_of(messages=[*MESSAGES, answer, {"role": "tool", "tool_call_id": "1", "content": "y"}])


CALLS = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ '(' + CALL + ')' }}{% endfor %}"
    "{% endfor %}"
)
THOUGHTS = "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        (CALLS.replace("CALL", "call.function.arguments"), {"content": None, "tool_calls": [CALLED]}, '({"x": 1})'),
        (CALLS.replace("CALL", "(call.function.arguments | tojson)"), {"tool_calls": [CALLED]}, '({"x": 1})'),
        (THOUGHTS, {"content": "Yes.", "reasoning_content": "Let me look."}, "Let me look."),
        (THOUGHTS, {"content": "Yes.", "reasoning": "Let me look."}, "Let me look."),
    ],
)
def test_templates_get_calls_and_thoughts_as_they_take_them(served, monkeypatch, template, answer, shown):
    """Some join arguments to text, others write them as JSON by themselves."""
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    body = parse(ChatBody, {"model": MODEL, "messages": [*MESSAGES, {"role": "assistant", **answer}]})
    (text,) = Translator(served.engine).texts_of(body)
    assert served.engine.tokenizer.decode(text.prompt) == shown


def test_nulls_of_tools_are_left_out(served, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    body = parse(ChatBody, {"model": MODEL, "messages": MESSAGES, "tools": [{**TOOL, "function": function}]})
    assert body.offered == [{"type": "function", "function": {"name": "f"}}]
    assert Translator(served.engine).texts_of(body)


@pytest.mark.parametrize(
    "name", ["chat_template", "tools", "messages", "tokenize", "padding", "tokenizer_kwargs", "return_tensors"]
)
def test_a_clients_template_options_are_variables(texts_of, name):
    with pytest.raises(ApiError, match=f"{name!r} is the server's own to set") as refused:
        texts_of(chat_template_kwargs={name: "x"})
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_what_changes_nothing_is_named(served):
    """Strict tools are followed where a call is forced."""
    tools = [{"type": "function", "function": {**TOOL["function"], "strict": True}}]
    for more, named in (
        ({"chat_template_kwargs": {"enable_thinkin": False}}, ["chat_template_kwargs.enable_thinkin"]),
        ({"tools": tools}, ["tools.function.strict"]),
        ({"tools": tools, "tool_choice": "required"}, []),
    ):
        assert Translator(served.engine).ignored(parse(ChatBody, {"messages": MESSAGES, **more})) == named


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        '"temperature": 1e-38', '"temperature": 1e-6', '"temperature": NaN', '"temperature": -1',
        '"repetition_penalty": 1e-40', '"repetition_penalty": 0', '"repetition_penalty": 1e9',
        '"logit_bias": {"5": NaN}', '"logit_bias": {"5": Infinity}', '"logit_bias": {"5": 1e39}',
        '"logit_bias": {"5": -1e999}', '"presence_penalty": NaN', '"frequency_penalty": 1e30', '"min_p": 2',
        '"top_p": 0', f'"top_k": {2**70}', f'"seed": {"9" * 4000}', f'"seed": {2**64}', '"min_tokens": -1',
        '"top_logprobs": 21', '"n": 1e9',
    ],
)  # fmt: skip
def test_extremes_are_refused_at_the_door(setting):
    body = f'{{"model": "x", "messages": [{{"role": "user", "content": "x"}}], "logprobs": true, {setting}}}'
    with pytest.raises(ApiError) as refused:
        parse(ChatBody, parse_json(body.encode()))
    assert refused.value.status == 400


# --- and what they do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fits"),
    [
        ({"structured_outputs": {"json": {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"],
          "additionalProperties": False}}},
         lambda text: json.loads(text)["x"] == 1),
        ({"structured_outputs": {"json": '{"enum": ["one"]}'}}, lambda text: json.loads(text) == "one"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"structured_outputs": {"choice": ["sunny", "ra\"in\n"]}}, lambda text: text in ("sunny", "ra\"in\n")),
        ({"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}, lambda text: text in ("ab", "cd")),
        ({"response_format": {"type": "json_object", "schema": {"enum": [{"a": 1}]}}},
         lambda text: json.loads(text) == {"a": 1}),
    ],
)  # fmt: skip
def test_texts_follow_what_other_servers_call_structured(client, field, fits):
    pytest.importorskip("llguidance")
    assert fits(chat(client, extra_body=field).choices[0].message.content)
    if "response_format" not in field:
        told = client.completions.create(model=MODEL, prompt="It is", temperature=0, max_tokens=64, extra_body=field)
        assert fits(told.choices[0].text)


def test_one_of_many_texts_can_be_chosen_and_a_grammar_that_is_too_large_is_an_error(client):
    pytest.importorskip("llguidance")
    texts = [f"w{number}" * 20 for number in range(5000)]
    chosen = chat(client, extra_body={"structured_outputs": {"choice": texts}}, max_tokens=200)
    assert chosen.choices[0].message.content in texts
    too_large = {"structured_outputs": {"grammar": "start: " + " | ".join(map(json.dumps, texts))}}
    assert "too large to be followed" in error_of(client, 500, extra_body=too_large)["message"]
