"""A row whose logits processors or tokenizer raise ends alone, with what they said; the others notice nothing."""

from __future__ import annotations

from typing import Any

import pytest
from test_no_numbers import LENGTH, ask, victims_of
from torch import Tensor
from transformers import LogitsProcessor

from eagle31_hf.serving import rows
from eagle31_hf.serving.engine import Engine
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from loopback import MESSAGES, SIZES

BEYOND = 10**6
"""An id that the target has no score for: what looks for it raises."""


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


PROMPT_LENGTH = 5
RAISING: dict[str, dict[str, Any]] = {
    "a bias, greedy": {"sampling": Sampling(0.0, logit_bias={BEYOND: 1.0})},
    "a bias, drawn": {"sampling": Sampling(1.0, seed=1, logit_bias={BEYOND: 1.0})},
    "a grammar at once": {"sampling": Sampling(0.0), "grammar": RaisesAt(0)},
    "a grammar later": {"sampling": Sampling(1.0, seed=1), "grammar": RaisesAt(PROMPT_LENGTH + 7)},
    "a grammar that drafts are shown": {"sampling": Sampling(0.0), "grammar": Forks(PROMPT_LENGTH + 7)},
}


@pytest.fixture(scope="module")
def engine(pair):
    made = Engine(pair.drafter, pair.tokenizer, SIZES)
    yield made
    made.close(0)


@pytest.fixture(scope="module")
def wanted(pair, engine):
    """What two texts are where nothing is amiss."""
    victims = victims_of(engine, encode_chat(pair.tokenizer, MESSAGES))
    assert all(victim.ended.wait(60) for victim in victims)
    return [victim.tokens for victim in victims]


UNKNOWN = 7001
"""A token that the tokenizer cannot decode while `knows_not_all` holds."""


@pytest.fixture
def knows_not_all(pair, monkeypatch):
    decode = pair.tokenizer.decode

    def decode_known(ids, **how):
        if UNKNOWN in ids:
            raise IndexError("piece id is out of range")
        return decode(ids, **how)

    monkeypatch.setattr(pair.tokenizer, "decode", decode_known)


def test_a_row_whose_text_cannot_be_decoded_ends_alone(pair, engine, wanted, knows_not_all):
    """A target may have more rows than its tokenizer has tokens."""
    victims = victims_of(engine, encode_chat(pair.tokenizer, MESSAGES))
    attacker = ask(engine, [10, 11, 12], Sampling(0.0, logit_bias={UNKNOWN: 100.0}))
    assert all(listener.ended.wait(60) for listener in (*victims, attacker))
    assert (attacker.finish, attacker.error) == ("error", "IndexError: piece id is out of range")
    assert [victim.tokens for victim in victims] == wanted


@pytest.mark.parametrize("how", list(RAISING))
@pytest.mark.thorough(every=4)
def test_a_row_whose_processor_raises_ends_alone(pair, engine, wanted, monkeypatch, how):
    monkeypatch.setattr(rows, "GrammarProcessor", lambda grammar, *_: grammar)
    victims = victims_of(engine, encode_chat(pair.tokenizer, MESSAGES))
    attacker = ask(engine, range(10, 10 + PROMPT_LENGTH), **RAISING[how])
    assert attacker.ended.wait(60)
    assert attacker.finish == "error"
    assert attacker.error.startswith(("IndexError: ", "ValueError: ", "KeyError: 'no such state'"))
    later = isinstance(RAISING[how].get("grammar"), RaisesAt) and how != "a grammar at once"
    assert len(attacker.tokens) == (7 if later else 0), "what was written before stays"
    after = ask(engine, encode_chat(pair.tokenizer, MESSAGES), Sampling(0.0), most=LENGTH)
    assert all(listener.ended.wait(60) for listener in (*victims, after))
    assert [victim.tokens for victim in victims] == wanted
    assert after.tokens == wanted[0]
