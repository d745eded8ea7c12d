"""Requests as clients make them, replayed; `examples/studies/record_requests.py` records such files.

Open WebUI's alone are written by hand, after its source.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from record_requests import Recorder
from transformers import AutoTokenizer

from eagle31_hf.demo import target_path
from loopback import MODEL, SIZES, TOOL_TEMPLATE, serving

RECORDED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "recorded").glob("*.json")}
NOT_READ = {
    "enable_thinking", "metadata", "prediction", "prompt_cache_key", "reasoning_effort", "repeat_penalty",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Of all that these clients send."""


@pytest.fixture(scope="module")
def url(pair):
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = TOOL_TEMPLATE
    with serving(pair._replace(tokenizer=tokenizer), replace(SIZES, context=1024)) as made:
        yield made.url


def test_the_clients_are_there():
    wanted = {"ai", "aider-chat", "langchain-openai", "litellm", "llama-index-llms-openai-like", "open-webui", "openai",
              "opencode-ai", "pydantic-ai-slim", "smolagents"}  # fmt: skip
    assert set(RECORDED) == wanted
    assert all(recorded["version"] for recorded in RECORDED.values())


def test_requests_are_recorded_on_their_way(url, tmp_path):
    recorder = Recorder(str(httpx2.URL(url).copy_with(path="")))
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{recorder.server_port}/v1", api_key="secret", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**asked, stream=True)]
    client.chat.completions.create(**asked)
    recorder.shutdown()
    assert "".join(pieces) == whole
    recorder.write(tmp_path / "openai.json", "openai", openai.__version__)
    text = (tmp_path / "openai.json").read_text()
    made = json.loads(text)
    assert made["client"] == "openai"
    assert [each["body"] for each in made["requests"]] == [asked, {**asked, "stream": True}], "the same one once"
    assert "secret" not in text


@pytest.mark.parametrize("client", sorted(RECORDED))
def test_what_a_client_asks_is_answered(url, client):
    with httpx2.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(ask_and_check, http), RECORDED[client]["requests"]))


def ask_and_check(http: httpx2.Client, request: dict[str, Any]) -> None:
    body = request.get("body")
    told = http.request(request["method"], request["path"], headers=request["headers"], json=body)
    assert told.status_code == 200, (body, told.text)
    if body is None:
        assert [model["id"] for model in told.json()["data"]] == [MODEL]
        return
    ignored = set(filter(None, told.headers.get("x-ignored-fields", "").split(", ")))
    unread = NOT_READ & {name for name, value in body.items() if value is not None}
    if body.get("tool_choice", "auto") == "auto" and any(
        tool["function"].get("strict") for tool in body.get("tools", ())
    ):
        unread |= {"tools.function.strict"}
    assert ignored == unread
    if "prompt" in body:
        Completion.model_validate(told.json(), strict=True)
    elif body.get("stream"):
        check_stream(body, told.text)
    else:
        check_answer(body, ChatCompletion.model_validate(told.json(), strict=True))


def check_answer(body: dict[str, Any], answer: ChatCompletion) -> None:
    assert len(answer.choices) == body.get("n", 1)
    assert answer.usage.completion_tokens > 0
    for choice in answer.choices:
        if choice.finish_reason == "length":
            continue
        if body.get("response_format"):
            json.loads(choice.message.content)
        if body.get("tool_choice", "auto") not in ("auto", "none"):
            assert choice.finish_reason == "tool_calls"
            names = {tool["function"]["name"] for tool in body["tools"]}
            for call in choice.message.tool_calls:
                assert call.function.name in names
                json.loads(call.function.arguments)


def check_stream(body: dict[str, Any], text: str) -> None:
    *events, end = text.split("\n\n")[:-1]
    assert end == "data: [DONE]"
    pieces = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True) for event in events]
    finishes = [choice.finish_reason for piece in pieces for choice in piece.choices if choice.finish_reason]
    assert len(finishes) == len({piece.id for piece in pieces}) == 1
    asks_usage = (body.get("stream_options") or {}).get("include_usage")
    assert [piece.usage is not None for piece in pieces] == [False] * (len(pieces) - 1) + [bool(asks_usage)]
    if body.get("tool_choice") == "required":
        calls = [call for piece in pieces for choice in piece.choices for call in choice.delta.tool_calls or ()]
        assert calls
        assert all(json.loads(call.function.arguments) and call.id for call in calls)
