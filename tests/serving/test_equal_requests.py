"""In half precision, too, a seed writes the same text again, to the last bit, where nobody else is written for.

What a token computes to depends there on how many tokens are computed together. Log-probabilities show any difference.
"""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.calibration.unasked import calibrate
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.serving.engine import Engine, EngineSettings
from eagle31_hf.serving.prompts import encode_chat
from eagle31_hf.serving.requests import Sampling, TextRequest
from loopback import LoadedPair

CHUNK = 16


@pytest.fixture(scope="module")
def half(pair):
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.bfloat16).eval()
    return LoadedPair(target, Eagle31Drafter.from_pretrained(drafter_path(), target=target), pair.tokenizer)


@pytest.fixture(params=["drafts of one length", "calibrated drafts"])
def engine(half, request):
    if request.param == "calibrated drafts":
        calibrate(half.drafter, compiled=False)
    made = Engine(half.drafter, half.tokenizer, EngineSettings(max_rows=3, context=256, prefill_chunk=CHUNK))
    yield made
    made.close(0)


def start(engine, prompt, sampling):
    """Its tokens with their log-probabilities, and its last event, once it has ended."""
    told, ended, last = [], threading.Event(), []

    def hear(event):
        told.extend((each.token, each.logprob) for each in event.logprobs)
        if event.finish is not None:
            last.append(event)
            ended.set()

    engine.submit(TextRequest(tuple(prompt), 24, sampling, ignore_eos=True, top_logprobs=0), hear)
    return told, ended, last


def ask(engine, prompt, sampling):
    told, ended, last = start(engine, prompt, sampling)
    assert ended.wait(60)
    return told, last[0].usage.cached_tokens


@pytest.mark.thorough(every=2)
def test_a_seed_writes_the_same_again_to_the_last_bit(half, engine):
    """First with nothing to begin from; then from its own row, after others' texts, and from a row that goes on."""
    prompts = [encode_chat(half.tokenizer, list(messages)[:1]) for messages in CONVERSATIONS[:4]]
    prompt = [*prompts[0], *prompts[1]]
    assert len(prompt) > 2 * CHUNK
    seeded = Sampling(temperature=1.0, seed=7)
    first, cached = ask(engine, prompt, seeded)
    assert cached == 0
    again, cached = ask(engine, prompt, seeded)
    assert (again, cached % CHUNK) == (first, 0)
    assert cached > 0, "whole pieces are not read again"
    crowd = [start(engine, other, Sampling(temperature=1.0)) for other in (*prompts[2:], prompt)]
    assert all(ended.wait(60) for _, ended, _ in crowd)
    assert ask(engine, prompt, seeded)[0] == first
    longer = [*prompt, *(token for token, _ in first)]
    ask(engine, longer, Sampling(temperature=1.0))  # resumed anywhere: it wants no text twice
    assert ask(engine, prompt, seeded)[0] == first
    parted = [*prompt[: CHUNK + 5], *prompts[2], *prompts[3]]
    ask(engine, parted, Sampling(temperature=1.0))  # its pieces begin in the middle of one of the first prompt's
    of_parted = ask(engine, parted, seeded)[0]
    engine.batch._parked.clear()
    assert ask(engine, parted, seeded)[0] == of_parted
    shared = [*prompt, *prompts[3]]
    of_shared = ask(engine, shared, seeded)[0]
    engine.batch._parked.clear()
    assert ask(engine, shared, seeded) == (of_shared, 0)


@pytest.mark.thorough(every=2)
def test_a_text_without_a_seed_is_not_read_again(half, engine):
    prompt = encode_chat(half.tokenizer, list(CONVERSATIONS[0])[:1])
    ask(engine, prompt, Sampling(temperature=1.0))
    assert ask(engine, prompt, Sampling(temperature=1.0))[1] == len(prompt) - 2
