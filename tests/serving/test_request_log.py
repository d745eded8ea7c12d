"""What the one who runs the server sees: a line for each request, a page, and what to ask instead."""

from __future__ import annotations

import logging
import re

import httpx2
import openai
import pytest
from test_server_interrupted import wait_until

from eagle31_hf.serving.app import logger
from loopback import MODEL, QUESTION, chat, error_of

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


def test_a_client_that_goes_away_frees_its_row_and_is_one_line_too(served, client, lines):
    requests = served.engine.scheduler.requests
    cancelled = requests["cancelled"]
    stream = chat(client, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until(lambda: requests["cancelled"] == cancelled + 1)
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), extra_body={"ignore_eos": True}, n=4)
    wait_until(lambda: len(lines()) == 2 and not served.engine.scheduler.texts)
    assert all("cancelled: " in line for line in lines())


def test_a_line_holds_no_line_ends_of_a_clients(served, lines):
    httpx2.get(f"{served.url}/x%0Ay")
    httpx2.post(f"{served.url}/v1/completions", json={"a\nb": 1, "model": MODEL, "prompt": "x"})
    assert [line.count("\n") for line in lines()] == [0, 0, 0]
