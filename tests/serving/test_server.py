"""The server asked by the real `openai` client over loopback: texts, streams, choices, figures, who may ask, and what
the one who runs it sees."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from test_server_interrupted import wait_until

import eagle31_hf.serving
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.serving.app import logger
from eagle31_hf.texts.chats import encode_chat
from loopback import HTTP, MESSAGES, MODEL, QUESTION, SIZES, chat, error_of, serving


def test_a_chat_is_what_generate_writes(client, pair):
    answer = chat(client)
    usage, text = answer.usage, answer.choices[0].message.content
    assert text == pair.answer(QUESTION)
    assert [chat(client, **limit).choices[0].finish_reason for limit in ({}, {"max_tokens": 3})] == ["stop", "length"]
    assert usage.completion_tokens == len(pair.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_crowd_gets_the_same_texts_as_each_would_alone(client, pair):
    wanted = [pair.text(encode_chat(pair.tokenizer, messages), max_new_tokens=48) for messages in CONVERSATIONS]
    order = [i % len(CONVERSATIONS) for i in range(18)]
    with ThreadPoolExecutor(len(order)) as crowd:
        answers = list(crowd.map(lambda i: chat(client, list(CONVERSATIONS[i]), max_tokens=48), order))
    assert [answer.choices[0].message.content for answer in answers] == [wanted[i] for i in order]


def test_completions_go_on_with_text_and_with_token_ids(client, pair):
    ids = pair.tokenizer("The weather in Portland")["input_ids"]
    wanted = pair.text(ids, max_new_tokens=12)
    for prompt in ("The weather in Portland", ids):
        told = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
        assert told.choices[0].text == wanted
    several = client.completions.create(model=MODEL, prompt=["The weather", "A shop"], temperature=0, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1]
    pieces = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == wanted


def test_several_choices_share_one_prompt(client):
    told = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, temperature=1.5, seed=7, max_tokens=16
    )  # fmt: skip
    texts = [choice.message.content for choice in told.choices]
    assert [choice.index for choice in told.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert told.usage.prompt_tokens_details.cached_tokens > 0, "the second choice need not read the prompt"


def test_log_probabilities_are_the_targets_own(client, pair):
    told = chat(client, logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
    assert "".join(each.token for each in told.logprobs.content) == told.message.content
    for each in told.logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == pytest.approx(max(other.logprob for other in each.top_logprobs))
        assert each.logprob <= 0
    logits = pair.target(torch.tensor([encode_chat(pair.tokenizer, MESSAGES)])).logits[0, -1]
    wanted = logits.detach().float().log_softmax(-1).max().item()
    assert told.logprobs.content[0].logprob == pytest.approx(wanted, abs=1e-4)


def test_penalties_and_biases_change_what_is_written(client, pair):
    (token,) = pair.tokenizer(" rain", add_special_tokens=False)["input_ids"][-1:]
    biased = chat(client, logit_bias={str(token): 100}, max_tokens=4)
    assert biased.choices[0].message.content == pair.tokenizer.decode([token] * 4)
    penalised = chat(client, logit_bias={str(token): 20}, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=40)
    assert penalised.choices[0].message.content != pair.tokenizer.decode([token] * 40)


def test_metrics_are_prometheus_and_count(served, client):
    def figures():
        text = HTTP.get(f"{served.url}/metrics").text
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = figures()
    answer = chat(client)
    after = figures()
    written = ("eagle31_tokens_total", "completion")
    assert after[written] - before.get(written, 0) == answer.usage.completion_tokens
    assert after[("eagle31_draft_tokens_total", "accepted")] > 0
    assert after[("eagle31_text_rounds_total",)] >= after[("eagle31_rounds_total",)] > 0
    assert after[("eagle31_acceptance_length",)] > 1
    assert after[("eagle31_cache_bytes",)] > 0
    assert all(after[("eagle31_seconds_total", phase)] > 0 for phase in ("prefill", "draft", "verify"))
    assert after[("eagle31_time_to_first_token_seconds_count",)] > 0
    assert after[("eagle31_requests_waiting",)] == 0


def test_models_and_health(served, client):
    assert client.models.retrieve(MODEL).id == MODEL
    (model,) = HTTP.get(f"{served.url}/v1/models").json()["data"]
    assert model["target"]
    assert model["drafter"]
    assert model["max_model_len"] == SIZES.context
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert HTTP.get(f"{served.url}/health").json()["model"] == MODEL


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
    HTTP.get(f"{served.url}/x%0Ay")
    HTTP.post(f"{served.url}/v1/completions", json={"a\nb": 1, "model": MODEL, "prompt": "x"})
    assert [line.count("\n") for line in lines()] == [0, 0, 0]


FOLDER = Path(eagle31_hf.serving.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "developing" / "architecture.md"


def test_a_chat_request_passes_few_files(pair):
    """Those that docs/developing/architecture.md lists, and no other of the server's."""
    entered: set[str] = set()
    watches = False

    def note(frame: Any, event: str, _argument: Any) -> None:
        path = frame.f_code.co_filename
        if watches and event == "call" and path.startswith(str(FOLDER)) and frame.f_code.co_name != "<module>":
            entered.add(Path(path).name)

    threading.setprofile(note)
    try:
        with serving(pair) as made:
            client = made.client()
            chat(client, max_tokens=4)  # what is made once for all requests
            watches = True
            chat(client, max_tokens=4)
            watches = False
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    walk = PAGE.read_text().partition("A chat request, from")[2].partition("A training row")[0]
    assert entered == set(re.findall(r"^\| `serving/(\w+\.py)` \|", walk, re.MULTILINE))
    assert len(entered) <= 9
