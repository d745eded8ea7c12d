"""Bad input is told what is wrong in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import re

import pytest

from eagle31_hf.serving.api_errors import ApiError
from eagle31_hf.serving.bodies import ChatBody, parse, parse_json
from loopback import HTTP, MESSAGES, MODEL, chat, serving

TOO_LONG = "this model's maximum context length is 512 tokens"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BANANA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "other"}, 404, "'demo' is"),
        ({"messages": None}, 400, "messages is missing"),
        ({"messages": []}, 400, "messages: got []; wanted at least 1 of them"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "text"),
        ({"temperature": 3}, 400, "temperature: got 3; wanted at most 2.0"),
        ({"temperature": "0.5"}, 400, 'temperature: got "0.5"; wanted a number'),
        ({"max_tokens": True}, 400, "max_tokens: got true; wanted a number"),
        ({"n": 1000}, 400, "n:"),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 400, "got max_tokens 7 and max_completion_tokens 8; pass one"),
        ({"max_tokens": 0}, 400, "max_tokens: got 0; wanted at least 1, or -1 for no limit"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"stop": ["a"] * 99}, 400, "wanted at most 16 of them"),
        ({"stop": [""]}, 400, 'stop[0]: got ""; wanted some text'),
        ({"stop": 5}, 400, "stop: got 5; wanted a string or an array"),
        ({"tool_choice": "perhaps", "tools": [TOOL]}, 400, 'wanted "none", "auto" or "required" or an object'),
        ({"tool_choice": "required"}, 400, "without tools"),
        ({"tools": [TOOL]}, 400, "template has no place for tools"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens is 9, and 5"),
        ({"stop_token_ids": [10**6]}, 400, "stop_token_ids: a token id is 1000000"),
        ({"messages": [{"role": "user", "content": "many words " * 400}]}, 400, TOO_LONG),
        ({"max_tokens": 5000}, 400, TOO_LONG),
        ({"prompt": "A shop", "max_tokens": 0}, 400, "max_tokens is 0 without echo"),
        ({"prompt": ""}, 400, "prompt is empty"),
        (
            {"guided_json": {"type": "object"}},
            400,
            "guided_json was removed in 0.2.0: pass structured_outputs with json",
        ),
        ({"bad_words": ["rain"]}, 400, "bad_words was removed in 0.2.0: forbid tokens by a logit_bias"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
        ({"response_format": BANANA}, 400, "banana"),
        ({"structured_outputs": {"json": {"type": "object"}, "regex": "a"}}, 400, "json and structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, 400, 'structured_outputs.json: got "{"; EOF'),
        ({"structured_outputs": {"regex": "("}}, 400, "regex: this regular expression cannot be followed"),
        ({"structured_outputs": {"grammar": "start: missing"}}, 400, "grammar: this grammar cannot be followed"),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            400,
            "GBNF was removed in 0.2.0: write the grammar in Lark's",
        ),
        ({"structured_outputs": {"choice": []}}, 400, "choice: got []; wanted at least 1 of them"),
        ({"num_beams": 4}, 400, "num_beams would change the text and is not served; texts are drawn or greedy"),
        ({"structured_outputs": {"jsn": {}}}, 400, "structured_outputs.jsn: got {}; wanted a field that is served"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, 400, "follow one of them"),
    ],
)
def test_bad_input_is_told_what_is_wrong_and_the_server_goes_on(served, client, fields, status, says):
    if set(fields) & {"response_format", "structured_outputs"}:
        pytest.importorskip("llguidance")
    path = "completions" if "prompt" in fields else "chat/completions"
    asks = {} if "prompt" in fields else {"messages": MESSAGES}
    told = HTTP.post(f"{served.url}/v1/{path}", json={"model": MODEL, **asks, **fields})
    assert told.status_code == status
    message = told.json()["error"]["message"]
    assert says in message, message
    assert not re.search("Input should|Value error|validation", message), "words of pydantic"
    assert not re.search(r"\b(True|None|str|list|dict)\b", message), "words of Python"
    assert chat(client, max_tokens=2).choices[0].message.content


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b"\xff", "application/json", 400, "invalid_json"),
        (b'{"prompt": "x \\ud83d y"}', "application/json", 400, "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "x\\udf36"}]}', "application/json", 400, "invalid_json"),
        (b'{"tools": [{"\\ud83d": 1}]}', "application/json", 400, "invalid_json"),
        (b'{"\\ud83d": 1}', "application/json", 400, "invalid_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "application/json", 400, "missing_required_parameter"),
        (b" " * (9 * 2**20), "application/json", 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_request_get_an_error_in_openais_shape(served, body, kind, status, code):
    told = HTTP.post(f"{served.url}/v1/chat/completions", content=body, headers={"content-type": kind}, timeout=30)
    assert told.status_code == status
    assert set(told.json()["error"]) == {"message", "type", "param", "code"}
    assert told.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": True}, "invalid_type"),
        ({"max_tokens": 0}, "integer_below_min_value"),
        ({"n": 1000}, "integer_above_max_value"),
        ({"temperature": 1e-6}, "decimal_below_min_value"),
        ({"temperature": 3}, "decimal_above_max_value"),
        ({"messages": []}, "array_below_min_length"),
        ({"stop": ["a"] * 99}, "array_above_max_length"),
        ({"stop": ""}, "string_below_min_length"),
        ({"tool_choice": "perhaps"}, "invalid_value"),
        ({"max_tokens": 7, "max_completion_tokens": 8}, "invalid_parameter_combination"),
    ],
)
def test_what_is_wrong_has_the_name_that_openai_gives_it(fields, code):
    with pytest.raises(ApiError) as refused:
        parse(ChatBody, {"messages": MESSAGES, **fields})
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("body", "kind"), [(b"[]", "array"), (b'"x"', "string"), (b"true", "boolean"), (b"1", "integer")]
)
def test_a_body_that_is_no_object_is_told_what_it_is(body, kind):
    with pytest.raises(ApiError, match=f"JSON of type {kind}; wanted an object"):
        parse_json(body)


def test_unknown_paths_and_methods_get_the_same_shape(served):
    for path, status, says in (
        ("nothing", 404, "Not Found; served are /v1/chat/completions"),
        ("chat/completions", 405, "Method Not Allowed"),
    ):
        told = HTTP.get(f"{served.url}/v1/{path}")
        assert told.status_code == status
        assert says in told.json()["error"]["message"]


def test_a_key_is_asked_for(pair):
    with serving(pair, api_key="sesame") as locked:
        assert locked.client("sesame").models.list().data[0].id == MODEL
        for key in ("wrong", "sesam"):
            told = HTTP.get(f"{locked.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert told.status_code == 401
            assert told.json()["error"]["code"] == "invalid_api_key"
        assert HTTP.get(f"{locked.url}/v1/models").status_code == 401
        assert HTTP.get(f"{locked.url}/health").json()["status"] == "ok"


def test_browsers_let_the_pages_ask_that_were_named_and_no_others(pair, served):
    named, other = "http://localhost:3000", "http://localhost:3001"
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serving(pair, allow_origins=(named,), api_key="sesame") as made:
        path = f"{made.url}/v1/chat/completions"
        told = HTTP.options(path, headers={"origin": named, **asking})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, named)
        refused = HTTP.post(path, json={}, headers={"origin": named})
        assert "X-Ignored-Fields" in refused.headers["access-control-expose-headers"]
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, named), "errors are told"
        assert "access-control-allow-origin" not in HTTP.options(path, headers={"origin": other, **asking}).headers
    told = HTTP.get(f"{served.url}/v1/models", headers={"origin": named})
    assert "access-control-allow-origin" not in told.headers, "without a name no page may ask"
