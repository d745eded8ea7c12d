"""The server asked by the real `openai` client over loopback: texts, streams, errors, clients that go."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.serving.grammar import GrammarProcessor
from eagle31_hf.serving.prompts import encode_chat
from loopback import MODEL, SIZES, TOOL_TEMPLATE, serving

QUESTION = "What is the weather going to be like in Portland this weekend?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(served):
    return served.client()


def chat(client, messages=MESSAGES, **settings):
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **settings)


# --- the same text ----------------------------------------------------------------------------------------------------


def test_a_chat_is_what_generate_writes(client, pair):
    answer = chat(client)
    assert answer.choices[0].message.content == pair.answer(QUESTION)
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_crowd_gets_the_same_texts_as_each_would_alone(client, pair):
    wanted = [pair.text(encode_chat(pair.tokenizer, messages), max_new_tokens=48) for messages in CONVERSATIONS]
    order = [i % len(CONVERSATIONS) for i in range(18)]
    with ThreadPoolExecutor(len(order)) as crowd:
        answers = list(crowd.map(lambda i: chat(client, list(CONVERSATIONS[i]), max_tokens=48), order))
    assert [answer.choices[0].message.content for answer in answers] == [wanted[i] for i in order]


def test_a_stream_adds_up_to_the_text_and_tells_usage_when_asked(client, pair):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == pair.answer(QUESTION)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1


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


def test_stop_strings_end_a_text_and_are_cut_off(client, pair):
    whole = pair.answer(QUESTION)
    stop = whole[20:24]
    assert chat(client, stop=[stop, "never"]).choices[0].message.content == whole[: whole.index(stop)]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stop=stop, stream=True))
    assert streamed == whole[: whole.index(stop)]


def test_a_text_ends_at_its_length(client, pair):
    answer = chat(client, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert pair.answer(QUESTION).startswith(answer.choices[0].message.content)


def test_a_seed_writes_the_same_text_alone_and_in_a_crowd(client):
    def ask(seed):
        told = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1.2, top_p=0.95, seed=seed, max_tokens=24
        )
        return told.choices[0].message.content

    alone = [ask(seed) for seed in (1, 2, 3)]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(6) as crowd:
        assert list(crowd.map(ask, [1, 2, 3, 1, 2, 3])) == alone + alone


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
    legacy = client.completions.create(model=MODEL, prompt="A shop", temperature=0, max_tokens=4, logprobs=2)
    assert len(legacy.choices[0].logprobs.token_logprobs) == 4
    assert len(legacy.choices[0].logprobs.top_logprobs[0]) == 2


def test_penalties_and_biases_change_what_is_written(client, pair):
    (token,) = pair.tokenizer(" rain", add_special_tokens=False)["input_ids"][-1:]
    biased = chat(client, logit_bias={str(token): 100}, max_tokens=4)
    assert biased.choices[0].message.content == pair.tokenizer.decode([token] * 4)
    penalised = chat(client, logit_bias={str(token): 20}, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=40)
    assert penalised.choices[0].message.content != pair.tokenizer.decode([token] * 40)


def test_the_next_turn_is_not_read_again(client, pair):
    first = chat(client, max_tokens=24)
    turn = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
    turn.append({"role": "user", "content": "And on Monday?"})
    second = chat(client, turn, max_tokens=24)
    read_again = second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 3
    assert read_again < 16
    ids = encode_chat(pair.tokenizer, turn)
    assert second.choices[0].message.content == pair.text(ids, max_new_tokens=24)


# --- JSON and tools ---------------------------------------------------------------------------------------------------

FREE = "Tell me of a river."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "day": {"enum": ["Saturday", "Sunday"]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["Saturday", "Sunday"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_follows_its_json_schema(client):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}
    told = json.loads(chat(client, response_format=wanted).choices[0].message.content)
    assert set(told) == {"city", "day"}
    assert told["day"] in ("Saturday", "Sunday")
    drawn = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=1.5, seed=1, n=3, response_format=wanted
    )
    assert all(json.loads(choice.message.content)["day"] for choice in drawn.choices)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 5, "logit_bias": {"300": 2}}])
def test_json_is_drafted_inside_its_grammar(client, monkeypatch, how):
    """The same texts as without, alone and beside others, by more accepted drafts: where one token alone may come."""
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}

    def ask(content):
        settings = (
            {"temperature": 0, "max_tokens": 128} | how | ({} if content == FREE else {"response_format": wanted})
        )
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=MODEL, messages=messages, **settings)

    questions = ["How will the weather be?", "Where shall we go on Sunday?", FREE]
    alone = [ask(each) for each in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    monkeypatch.setattr(GrammarProcessor, "fork_for_drafts", None)
    outside = [ask(each) for each in questions]
    texts = [[told.choices[0].message.content for told in way] for way in (alone, together, outside)]
    assert texts[0] == texts[1] == texts[2]
    inside, without = (
        [told.usage.completion_tokens_details.accepted_prediction_tokens for told in way[:2]]
        for way in (alone, outside)
    )
    assert all(json.loads(text)["day"] for text in texts[0][:2])
    assert all(more >= less + 5 for more, less in zip(inside, without, strict=True)), (inside, without)


@pytest.fixture(scope="module")
def with_tools(pair):
    """The same pair under a template that has a place for tools."""
    from transformers import AutoTokenizer

    from eagle31_hf.demo import target_path

    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = TOOL_TEMPLATE
    with serving(pair._replace(tokenizer=tokenizer)) as made:
        yield made.client()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_function_that_has_to_be_called_is(with_tools, choice):
    pytest.importorskip("llguidance")
    told = chat(with_tools, tools=[WEATHER], tool_choice=choice).choices[0]
    (call,) = told.message.tool_calls
    assert told.finish_reason == "tool_calls"
    assert told.message.content is None
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["day"] in ("Saturday", "Sunday")
    answered = [
        *MESSAGES,
        told.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert chat(with_tools, answered, tools=[WEATHER], tool_choice="none", max_tokens=8).choices[0].message.content


def test_a_streamed_call_is_a_call(with_tools):
    pytest.importorskip("llguidance")
    chunks = list(chat(with_tools, tools=[WEATHER], tool_choice="required", stream=True))
    calls = [call for chunk in chunks for call in (chunk.choices[0].delta.tool_calls or [])]
    assert [call.function.name for call in calls] == ["get_weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_template_without_tools_says_so(client):
    with pytest.raises(openai.BadRequestError, match="template has no place for tools"):
        chat(client, tools=[WEATHER])


# --- bad input --------------------------------------------------------------------------------------------------------


def error_of(client, status, **settings):
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, **settings})
    assert caught.value.status_code == status
    assert caught.value.body["message"]
    return caught.value.body


@pytest.mark.parametrize(
    ("settings", "status", "says"),
    [
        ({"model": "other"}, 404, "'demo' is"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "text"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 1000}, 400, "n:"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"stop": ["a"] * 99}, 400, "99"),
        ({"tool_choice": "required"}, 400, "without tools"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
        ({"modalities": ["audio"]}, 400, "modalities"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}},
            400,
            "banana",
        ),
        ({"messages": [{"role": "user", "content": "many words " * 400}]}, 400, "512"),
        ({"max_tokens": 5000}, 400, "512"),
    ],
)
def test_bad_input_is_told_what_is_wrong_and_the_server_goes_on(client, pair, settings, status, says):
    if "response_format" in settings:
        pytest.importorskip("llguidance")
    assert says in error_of(client, status, **settings)["message"]
    assert chat(client, max_tokens=2).choices[0].message.content


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b"\xff", "application/json", 400, "invalid_json"),
        (b"{}", "text/plain", 415, "invalid_json"),
        (b"{}", "application/json", 400, "invalid_type"),
        (b" " * (9 * 2**20), "application/json", 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_request_get_an_error_in_openais_shape(served, body, kind, status, code):
    told = httpx2.post(f"{served.url}/v1/chat/completions", content=body, headers={"content-type": kind}, timeout=30)
    assert told.status_code == status
    assert set(told.json()["error"]) == {"message", "type", "param", "code"}
    assert told.json()["error"]["code"] == code


def test_unknown_paths_and_methods_get_the_same_shape(served):
    for told in (httpx2.get(f"{served.url}/v1/nothing"), httpx2.get(f"{served.url}/v1/chat/completions")):
        assert told.status_code in (404, 405)
        assert told.json()["error"]["message"]


def test_a_key_is_asked_for(pair):
    with serving(pair, api_key="sesame") as locked:
        assert locked.client("sesame").models.list().data[0].id == MODEL
        for key in ("wrong", "sesam"):
            told = httpx2.get(f"{locked.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert told.status_code == 401
            assert told.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{locked.url}/v1/models").status_code == 401
        assert httpx2.get(f"{locked.url}/health").json()["status"] == "ok"


def test_browsers_let_the_pages_ask_that_were_named_and_no_others(pair):
    named, other = "http://localhost:3000", "http://localhost:3001"
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serving(pair, allow_origins=(named,), api_key="sesame") as made:
        path = f"{made.url}/v1/chat/completions"
        told = httpx2.options(path, headers={"origin": named, **asking})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, named)
        refused = httpx2.post(path, json={}, headers={"origin": named})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, named), "errors are told"
        assert "access-control-allow-origin" not in httpx2.options(path, headers={"origin": other, **asking}).headers


def test_without_a_name_no_page_may_ask(served):
    told = httpx2.get(f"{served.url}/v1/models", headers={"origin": "http://localhost:3000"})
    assert "access-control-allow-origin" not in told.headers


# --- clients that go, queues, the end ---------------------------------------------------------------------------------


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_client_that_goes_away_frees_its_row(served, client):
    cancelled = served.engine.totals.requests.get("cancelled", 0)
    stream = chat(client, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until(lambda: served.engine.totals.requests.get("cancelled", 0) == cancelled + 1)
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), extra_body={"ignore_eos": True}, n=4)
    wait_until(lambda: served.engine.running == served.engine.waiting == 0)
    assert served.engine.batch.texts == []


def test_a_full_queue_says_when_to_come_back(pair):
    with serving(pair, replace(SIZES, max_rows=1, max_waiting=1)) as small:
        client = small.client()
        endless = {"stream": True, "extra_body": {"ignore_eos": True}}
        first = chat(client, **endless)
        next(iter(first))
        second = threading.Thread(target=lambda: chat(client, max_tokens=2))
        second.start()
        wait_until(lambda: small.engine.waiting == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        second.join(timeout=30)
        assert not second.is_alive()
        assert chat(client, max_tokens=2).choices[0].message.content


def test_a_server_that_is_stopped_finishes_what_runs(pair):
    with serving(pair, grace_s=20.0) as made:
        client = made.client()
        stream = chat(client, stream=True)
        pieces = iter(stream)
        first = next(pieces)
    text = (first.choices[0].delta.content or "") + "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == pair.answer(QUESTION)
    assert not made.engine.is_alive


def test_a_failure_in_a_round_ends_its_texts_and_no_others(served, client, monkeypatch):
    def fail():
        raise RuntimeError("a card has caught fire")

    monkeypatch.setattr(served.engine.batch, "round", fail)
    assert "fire" in error_of(client, 500)["message"]
    monkeypatch.undo()
    assert chat(client, max_tokens=4).choices[0].finish_reason == "length"


# --- figures ----------------------------------------------------------------------------------------------------------


def test_metrics_are_prometheus_and_count(served, client):
    def figures():
        text = httpx2.get(f"{served.url}/metrics").text
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
    assert after[("eagle31_time_to_first_token_seconds_count",)] > 0
    assert after[("eagle31_requests_waiting",)] == 0


def test_models_and_health(served, client):
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx2.get(f"{served.url}/health").json()["model"] == MODEL
