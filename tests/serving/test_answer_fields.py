"""Keys of answers as clients get them: neither more nor fewer than OpenAI's API has, null where a text goes on.

And `echo`: completions that repeat their prompt, with its log-probabilities, which evaluations score answers by.
"""

from __future__ import annotations

import json

import pytest
import torch

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


# --- echo -------------------------------------------------------------------------------------------------------------

PROMPT = "A shop sells apples at 3 dollars a bag, and the weather in Portland is going to be sunny. " * 3


def ids_of(pair, text=PROMPT):
    return pair.tokenizer(text)["input_ids"]


def echoed(client, **settings):
    return client.completions.create(model=MODEL, temperature=0, echo=True, **settings)


@torch.no_grad()
def scores(pair, ids):
    """The target's log-probabilities by one forward: `(n, V)` after each token."""
    return pair.target(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_prompts_log_probabilities_are_the_targets_own(client, pair, max_tokens):
    """Of a prompt longer than what is read at once, also where the server has read it before."""
    ids = ids_of(pair)
    assert len(ids) > 64
    wanted = scores(pair, ids)
    for _ in range(2):
        told = echoed(client, prompt=ids, max_tokens=max_tokens, logprobs=3).choices[0]
        values, top = told.logprobs.token_logprobs, told.logprobs.top_logprobs
        assert len(values) == len(top) == len(told.logprobs.tokens) == len(ids) + max_tokens
        assert values[0] is top[0] is None
        own = wanted[range(len(ids) - 1), ids[1:]]
        assert values[1 : len(ids)] == pytest.approx(own.tolist(), abs=1e-4)
        best = wanted[: len(ids) - 1].topk(3).values.tolist()
        for each, likeliest in zip(top[1 : len(ids)], best, strict=True):
            assert max(each.values()) == pytest.approx(likeliest[0], abs=1e-4)
            assert min(each.values()) == pytest.approx(likeliest[len(each) - 1], abs=1e-4)
    assert told.finish_reason == "length"
    greedy = [at for at in range(1, len(ids)) if wanted[at - 1].argmax() == ids[at]]
    assert greedy
    assert all(values[at] == max(top[at].values()) for at in greedy), "equal to the last digit, by which it is known"


def test_what_is_written_after_an_echo_is_as_without(client, pair):
    plain = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=9, logprobs=1).choices[0]
    for logprobs in (None, 1):
        told = echoed(client, prompt=PROMPT, max_tokens=9, logprobs=logprobs).choices[0]
        assert told.text == PROMPT + plain.text
    own = [part[-9:] for part in (told.logprobs.tokens, told.logprobs.text_offset)]
    assert own == [plain.logprobs.tokens, [len(PROMPT) + at for at in plain.logprobs.text_offset]]
    assert told.logprobs.token_logprobs[-9:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)


def test_offsets_find_each_token_in_the_text(client, pair):
    told = echoed(client, prompt=PROMPT, max_tokens=4, logprobs=0).choices[0]
    shown = 0
    for text, at in zip(told.logprobs.tokens, told.logprobs.text_offset, strict=True):
        if not text.startswith("<"):  # of a special token that the tokenizer begins texts with there is nothing to see
            assert told.text[at : at + len(text)] == text
            shown += 1
    assert shown >= len(ids_of(pair))


def test_several_prompts_and_choices_are_each_echoed(client, pair):
    prompts = [ids_of(pair, "A shop"), ids_of(pair, "The weather in Portland")]
    told = echoed(client, prompt=prompts, max_tokens=2, n=2, logprobs=1).choices
    for index, choice in enumerate(told):
        prompt = prompts[index // 2]
        assert choice.text.startswith(pair.tokenizer.decode(prompt))
        wanted = scores(pair, prompt)[range(len(prompt) - 1), prompt[1:]].tolist()
        assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)


def test_a_prompt_of_one_token_follows_nothing(client, pair):
    told = echoed(client, prompt=[ids_of(pair)[-1]], max_tokens=0, logprobs=2).choices[0]
    assert (told.logprobs.token_logprobs, told.logprobs.text_offset) == ([None], [0])
