"""The server asked by the real `openai` client over loopback: texts, streams, choices, figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.texts.chats import encode_chat
from loopback import HTTP, MESSAGES, MODEL, QUESTION, SIZES, chat

# --- the same text ----------------------------------------------------------------------------------------------------


def test_a_chat_is_what_generate_writes(client, pair):
    answer = chat(client)
    assert answer.choices[0].message.content == pair.answer(QUESTION)
    assert [chat(client, **limit).choices[0].finish_reason for limit in ({}, {"max_tokens": 3})] == ["stop", "length"]
    usage = answer.usage
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
    assert chunks[-1].usage.completion_tokens == len(pair.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
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


# --- figures ----------------------------------------------------------------------------------------------------------


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
