"""What the one who runs the server sees: a line for each request, a page, and what to ask instead."""

from __future__ import annotations

import logging
import re

import httpx2
import openai
import pytest
from test_server_interrupted import wait_until

from eagle31_hf.serving.front_page import ADDRESSES, ELSEWHERE
from eagle31_hf.serving.request_log import logger
from loopback import MODEL, QUESTION, chat, error_of, serving

SECRET = "hunter2"


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == logger.name]


def test_each_request_is_one_line_and_never_what_was_said(client, lines):
    messages = [{"role": "user", "content": f"My password is {SECRET}. {QUESTION}"}]
    chat(client, messages)
    list(chat(client, messages, stream=True, max_tokens=4))
    client.completions.create(model=MODEL, prompt=SECRET, max_tokens=3, n=2)
    error_of(client, 400, messages=messages, temperature=SECRET)
    error_of(client, 400, messages=[{"role": SECRET, "content": SECRET}])
    error_of(client, 404, messages=messages, model="other")
    wait_until(lambda: len(lines()) == 6)
    told = lines()
    assert re.search(
        r"POST /v1/chat/completions stop: \d+ prompt tokens \(\d+ held already\), \d+ written in \d+\.\d\d s "
        r"\(\d+\.\d/s\), \d\.\d\d a pass$",
        told[0],
    )
    assert "length: " in told[1]
    assert "POST /v1/completions length: " in told[2]
    assert ", 6 written" in told[2]
    assert told[3].endswith("POST /v1/chat/completions 400 invalid_type at 'temperature'")
    assert "400 invalid_value at 'messages[0].role'" in told[4]
    assert "404 model_not_found at 'model'" in told[5]
    assert SECRET not in "\n".join(told)


def test_who_goes_away_is_one_line_too(client, lines):
    stream = chat(client, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), extra_body={"ignore_eos": True}, n=4)
    wait_until(lambda: len(lines()) == 2)
    assert all("cancelled: " in line for line in lines())


def test_a_line_holds_no_line_ends_of_a_clients(served, lines):
    httpx2.get(f"{served.url}/x%0Ay")
    httpx2.post(f"{served.url}/v1/completions", json={"a\nb": 1, "model": MODEL, "prompt": "x"})
    assert [line.count("\n") for line in lines()] == [0, 0, 0]


def test_a_page_says_what_runs_here_and_loads_nothing(served, client):
    told = httpx2.get(served.url)
    assert (told.status_code, told.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for wanted in (MODEL, f"{served.url}/v1", "512 tokens", *(path for _, path, _ in ADDRESSES)):
        assert wanted in told.text
    assert not re.search(r"src=|<script|<link|@import", told.text)
    for method, path, _ in ADDRESSES:
        assert httpx2.request(method, served.url + path).status_code in (200, 415), "it is there"


def test_the_page_of_a_locked_server_says_so_and_holds_no_key(pair):
    with serving(pair, api_key="sesame") as locked:
        told = httpx2.get(locked.url).text
    assert "Authorization: Bearer $EAGLE31_API_KEY" in told
    assert "sesame" not in told


@pytest.mark.parametrize("path", list(ELSEWHERE))
def test_addresses_of_other_apis_say_what_to_ask_instead(served, path):
    told = httpx2.post(served.url + path, json={})
    assert told.status_code == 404
    assert told.json()["error"]["message"] == f"{path} is not served here: {ELSEWHERE[path]}"


def test_responses_of_the_openai_client_are_told_of_chats(client):
    with pytest.raises(openai.NotFoundError, match=r"client\.chat\.completions\.create"):
        client.responses.create(model=MODEL, input="Hello")
