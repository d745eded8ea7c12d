"""What a card cannot capture: the text is plain's, why is said, and stream and allocator are as before.

The card's streams and graphs are a stand-in; steps and texts are real, and lie on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_pairs import assert_plain, kept_target, make_pair
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle31_hf.graphs import captured
from eagle31_hf.graphs.captured import CapturesOnCuda
from eagle31_hf.loop import kept_graphs
from helpers import GROUPED, random_target
from streams import Card, stand_in


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = stand_in(monkeypatch)
    monkeypatch.setitem(captured.CAPTURES, "cpu", CapturesOnCuda(torch.device("cpu")))
    monkeypatch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 10)
    return made


class Asks(nn.Module):
    """A product that asks something before it is computed."""

    def __init__(self, product: nn.Module, question: Callable[[Tensor], object]):
        super().__init__()
        self.product, self.question = product, question

    def forward(self, states: Tensor) -> Tensor:
        self.question(states)
        return self.product(states)


def asking(question: Callable[[Tensor], object]) -> Any:
    target = copy.deepcopy(kept_target())
    layer = target.model.layers[1].mlp
    layer.up_proj = Asks(layer.up_proj, question)
    return target


def whose_length_is_asked(_card: Card) -> Any:
    """Dynamic NTK looks at the largest position of each forward."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return random_target(LlamaConfig(**{**GROUPED, "num_hidden_layers": 2, "rope_parameters": rope}))


def that_breaks_a_capture(card: Card) -> Any:
    def question(_states: Tensor) -> None:
        if card.allocating:
            card.broken = True
            raise RuntimeError("operation not permitted when stream is capturing\nat line 7")

    return asking(question)


CANNOT: dict[str, tuple[Callable[[Card], Any], str]] = {
    "a number that the host reads": (lambda _card: asking(lambda states: states.abs().max().item()), "waits for"),
    "outliers, as LLM.int8 takes them out": (
        lambda _card: asking(lambda states: (states.abs() > 6.0).any(0).nonzero()), "nonzero waits for",
    ),
    "dynamic rope": (whose_length_is_asked, "waits for"),
    "a call that captures forbid": (that_breaks_a_capture, "not permitted when stream is capturing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CANNOT)
def test_a_text_goes_on_without_graphs(kind: str, card: Card, caplog: pytest.LogCaptureFixture) -> None:
    make, why = CANNOT[kind]
    target = make(card)
    drafter = make_pair(target)
    for seed in range(2):
        assert_plain(drafter, seed, target=target)
        assert (drafter.stats.loop, drafter.stats.drafted > 0) == ("own", True)
    (reason,) = drafter.stats.fallbacks
    assert why in reason
    assert "\n" not in reason
    assert caplog.text.count("capturing failed") == 1, "said once"
    assert card.current is card.default
    assert not card.allocating, "or memory could not be given back, nor its end be noticed"
