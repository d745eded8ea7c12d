"""A row whose scores are no numbers, or whose processors or tokenizer raise, ends alone; others, and who comes after
it, notice nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessor

from eagle31_hf.serving import rows
from eagle31_hf.serving.engine import Engine
from eagle31_hf.serving.text import Request, Sampling
from eagle31_hf.texts.chats import encode_chat
from loopback import MESSAGES, SIZES

LENGTH = 64
POISON, UNKNOWN = 7000, 7001
"""Tokens whose embedding is no number while `poisoned` holds, and which the tokenizer cannot decode while
`knows_not_all` does."""
BEYOND = 10**6
"""An id that the target has no score for: what looks for it raises."""


class Listener:
    def __init__(self):
        self.text, self.tokens, self.finish, self.error = "", [], None, ""
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, event):
        self.text += event.text
        self.tokens += event.tokens
        self.began.set()
        if event.finish is not None:
            self.finish, self.error = event.finish, event.error
            self.ended.set()


@pytest.fixture
def engine(pair):
    made = Engine(pair.drafter, pair.tokenizer, SIZES)
    yield made
    made.close(0)


@pytest.fixture
def poisoned(pair):
    def spoil(module, inputs, output):
        return output.masked_fill((inputs[0] == POISON)[..., None], float("nan"))

    handle = pair.target.get_input_embeddings().register_forward_hook(spoil)
    yield
    handle.remove()


@pytest.fixture
def knows_not_all(pair, monkeypatch):
    """A target may have more rows than its tokenizer has tokens."""
    decode = pair.tokenizer.decode

    def decode_known(ids, **how):
        if UNKNOWN in ids:
            raise IndexError("piece id is out of range")
        return decode(ids, **how)

    monkeypatch.setattr(pair.tokenizer, "decode", decode_known)


def ask(engine, prompt, sampling, most=60, **more):
    listener = Listener()
    engine.submit(Request(tuple(prompt), most, sampling, **more), listener)
    return listener


def victims_of(engine, prompt):
    """Two texts that are being written, one greedy and one drawn."""
    victims = [ask(engine, prompt, Sampling(temperature=t, seed=3), most=LENGTH) for t in (0.0, 1.0)]
    assert all(victim.began.wait(30) for victim in victims)
    return victims


@pytest.fixture(scope="module")
def wanted(pair):
    """What the two write where nothing is amiss."""
    engine = Engine(pair.drafter, pair.tokenizer, SIZES)
    victims = victims_of(engine, encode_chat(pair.tokenizer, MESSAGES))
    assert all(victim.ended.wait(60) for victim in victims)
    engine.close(0)
    return [victim.tokens for victim in victims]


class RaisesAt(LogitsProcessor):
    """Raises once a text is so long."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyError("no such state")
        return scores


class Forks(RaisesAt):
    """Drafts are shown to it, too."""

    def fork_for_drafts(self) -> Forks:
        return self


HARMFUL: dict[str, dict[str, Any]] = {
    "drawn": {"sampling": Sampling(temperature=1e-38, seed=1)},
    "drawn by prefix": {"sampling": Sampling(temperature=1.0, seed=1, repetition_penalty=1e-40)},
    "greedy": {"sampling": Sampling(temperature=0.0, logit_bias={5: float("nan")})},
    "all forbidden": {
        "sampling": Sampling(temperature=1.0, seed=1, logit_bias=dict.fromkeys(range(8192), -float("inf")))
    },
    "all forbidden, greedy": {"sampling": Sampling(0.0, logit_bias=dict.fromkeys(range(8192), -float("inf")))},
    "in the prompt": {"prompt": [5, POISON, 6, 7]},
    "as the prompt's last token": {"prompt": [5, 6, 7, POISON]},
    "as the only token": {"prompt": [POISON]},
    "in the text": {"sampling": Sampling(0.0, logit_bias={POISON: 100.0})},
    "a bias raises, greedy": {"sampling": Sampling(0.0, logit_bias={BEYOND: 1.0})},
    "a bias raises, drawn": {"sampling": Sampling(1.0, seed=1, logit_bias={BEYOND: 1.0})},
    "the tokenizer raises": {"sampling": Sampling(0.0, logit_bias={UNKNOWN: 100.0})},
    "a grammar raises": {"sampling": Sampling(0.0), "grammar": RaisesAt(0)},
    "a grammar raises later": {"sampling": Sampling(1.0, seed=1), "prompt": range(10, 15), "grammar": RaisesAt(12)},
    "a grammar that drafts are shown raises": {"prompt": range(10, 15), "grammar": Forks(12)},
}
RAISED = ("IndexError: piece id", "ValueError: ", "KeyError: 'no such state'")


@pytest.mark.parametrize("how", list(HARMFUL))
@pytest.mark.thorough(every=5)
def test_a_row_that_fails_ends_alone(pair, engine, wanted, poisoned, knows_not_all, monkeypatch, caplog, how):
    monkeypatch.setattr(rows, "GrammarProcessor", lambda grammar, *_: grammar)
    prompt = encode_chat(pair.tokenizer, MESSAGES)
    victims = victims_of(engine, prompt)
    harmful = {"prompt": prompt, "sampling": Sampling(0.0), **HARMFUL[how]}
    attacker = ask(engine, **harmful)
    assert attacker.ended.wait(60)
    assert attacker.finish == "error"
    assert attacker.error.startswith(RAISED) if "raise" in how else "no numbers" in attacker.error
    assert "raise" in how or not any(record.exc_info for record in caplog.records), "numbers are no fault of the code"
    if "grammar" in harmful:
        assert len(attacker.tokens) == (0 if harmful["prompt"] == prompt else 7), "what was written before stays"
    after = [
        ask(engine, prompt, Sampling(0.0), most=LENGTH) for _ in range(SIZES.max_rows)
    ]  # also in the attacker's place
    again = ask(engine, prompt, Sampling(0.0), most=4) if harmful["prompt"] == prompt else None
    assert all(listener.ended.wait(60) for listener in (*victims, *after))
    assert [victim.tokens for victim in victims] == wanted
    assert all(listener.tokens == wanted[0] for listener in after)
    assert [victim.finish for victim in victims] == ["length"] * 2
    if again is not None:
        assert again.ended.wait(60)
        assert again.tokens == wanted[0][:4]


def test_nothing_of_a_row_that_failed_is_left(pair, engine, poisoned):
    """Masked keys and values are multiplied by zero, which does not make numbers of them."""
    prompt = encode_chat(pair.tokenizer, MESSAGES)
    for harmful, sampling in ((prompt, Sampling(0.0, logit_bias={POISON: 100.0})), ([5, POISON, 6, 7], Sampling(0.0))):
        assert ask(engine, harmful, sampling).ended.wait(60)
    engine.close(0)
    caches = (engine.batch.cache, engine.batch.session.cache, engine.batch.prompt_caches.target)
    storages = [storage for cache in caches for layer in cache.layers for storage in layer.storages]
    assert storages
    assert not any(storage.isnan().any() for storage in storages)
