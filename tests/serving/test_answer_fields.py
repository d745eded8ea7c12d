"""Keys of answers as clients get them: neither more nor fewer than OpenAI's API has, null where a text goes on."""

from __future__ import annotations

import json

import pytest

from loopback import HTTP, MESSAGES, MODEL

USAGE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
    "completion_tokens_details": {"accepted_prediction_tokens": int, "rejected_prediction_tokens": int},
}
TOKEN = {"token": str, "logprob": float, "bytes": [int]}
LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN]}]}
TIMINGS = {
    "cache_n": int, "draft_n": int, "draft_n_accepted": int,
    **{f"{part}_n": int for part in ("prompt", "predicted")},
    **{f"{part}_{unit}": float for part in ("prompt", "predicted") for unit in ("ms", "per_token_ms", "per_second")},
}  # fmt: skip
SHARED = {"id": str, "created": int, "model": str}
CHAT = {"messages": MESSAGES, "max_tokens": 2}
TEXT = {"prompt": "A shop", "max_tokens": 2}
TOLD_OF_TOKENS = {
    "tokens": [str],
    "token_logprobs": [float],
    "top_logprobs": [{"*": float}],
    "text_offset": [int],
}


def shape(told, name=""):
    """The same with types instead of values, but for what objects are called; of a list, one of its first entry."""
    if name == "object":
        return told
    if isinstance(told, dict):
        if name == "top_logprobs" and "token" not in told:
            return {"*": shape(next(iter(told.values())))}
        return {key: shape(value, key) for key, value in told.items()}
    if isinstance(told, list):
        return [shape(each, name) for each in told[:1]]
    return None if told is None else type(told)


def ask(served, path, **body):
    told = HTTP.post(f"{served.url}/v1/{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=60)
    assert told.status_code == 200, told.text
    return told


def streamed(served, path, **body):
    """Shapes of all pieces."""
    lines = ask(served, path, stream=True, **body).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [shape(json.loads(line.removeprefix("data: "))) for line in lines[:-2] if line]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_chat(served, logprobs):
    asked = {"logprobs": True, "top_logprobs": 1} if logprobs else {}
    told = {"logprobs": LOGPROBS} if logprobs else {}
    message = {"role": str, "content": str}
    choice = {"index": int, "message": message, "finish_reason": str, **told}
    whole = ask(served, "chat/completions", **CHAT, **asked)
    assert whole.headers["content-type"] == "application/json"
    named = {**SHARED, "object": "chat.completion"}
    assert shape(whole.json()) == {**named, "choices": [choice], "usage": USAGE, "timings": TIMINGS}
    named["object"] = "chat.completion.chunk"

    def chunk(delta, finish=None, **more):
        return {**named, "choices": [{"index": int, "delta": delta, "finish_reason": finish, **more}]}

    pieces = streamed(served, "chat/completions", **CHAT, **asked, stream_options={"include_usage": True})
    assert pieces[0] == chunk(message)
    assert all(piece == chunk({"content": str}, **told) for piece in pieces[1:-2])
    assert len(pieces) > 3
    assert pieces[-2:] == [chunk({}, str), {**named, "choices": [], "usage": USAGE, "timings": TIMINGS}]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_completion(served, logprobs):
    asked, told = ({"logprobs": 1}, TOLD_OF_TOKENS) if logprobs else ({}, None)
    named = {**SHARED, "object": "text_completion"}
    choice = {"index": int, "text": str, "finish_reason": str, "logprobs": told}
    whole = ask(served, "completions", **TEXT, **asked).json()
    assert shape(whole) == {**named, "choices": [choice], "usage": USAGE, "timings": TIMINGS}
    pieces = streamed(served, "completions", **TEXT, **asked, stream_options={"include_usage": True})
    text = {**named, "choices": [choice], "usage": None}
    assert all(piece in (text, {**text, "choices": [choice | {"finish_reason": None}]}) for piece in pieces[:-1])
    assert pieces[-2] == text
    assert pieces[-1] == {**named, "choices": [], "usage": USAGE, "timings": TIMINGS}


def test_timings_count_what_usage_counts(served):
    told = ask(served, "chat/completions", messages=MESSAGES, max_tokens=9).json()
    usage, timings = told["usage"], told["timings"]
    details = usage["completion_tokens_details"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 9
    assert timings["draft_n_accepted"] == details["accepted_prediction_tokens"]
    assert timings["draft_n"] == timings["draft_n_accepted"] + details["rejected_prediction_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    lines = ask(served, "chat/completions", messages=MESSAGES, max_tokens=9, stream=True).text.split("\n\n")
    pieces = [json.loads(line[len("data: ") :]) for line in lines[:-2]]
    assert [("timings" in piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["timings"]["predicted_n"] == 9
