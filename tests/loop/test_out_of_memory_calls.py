"""Memory runs out beneath what a call brings along: scores, streamers, sampling, carried caches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.loop.carried_cache import CarriedCache
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.survive import NOT_HANDED_OVER
from helpers import Shown, configured, drafter_of, oracle_drafts, seeded, target_of
from memory_faults import (
    DROPPED,
    FREED,
    METHODS,
    SHAPES,
    Fault,
    assert_undisturbed,
    prompts_of,
    speculative,
)

pytestmark = pytest.mark.usefixtures("quick")


# --- what else a call brings along -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["text", "keep", "absorb", "verify", "first token"])
def test_scores_are_those_of_the_text(place: str) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with configured(drafter_of("llama"), **SHAPES["tree"]):
        truth = speculative("llama", 3, **asked)
        with Fault(1).after(*METHODS[place]) as fault:
            output = speculative("llama", 3, **asked)
    assert fault.raised
    assert torch.equal(output.sequences, truth.sequences)
    for found, wanted in ((output.scores, truth.scores), (output.logits, truth.logits)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", ["text", "stop", "keep", "absorb", "first token"])
def test_nothing_is_streamed_twice_or_left_out(place: str) -> None:
    for fault, when in ((Fault(1), "after"), (Fault(3), "after"), (Fault(2), "before")):
        listener = Shown()
        with configured(drafter_of("llama"), **SHAPES["chain"]), getattr(fault, when)(*METHODS[place]):
            text = speculative("llama", 1, end=True, streamer=listener)
        assert listener.tokens == text[0].tolist()


def test_what_a_streamer_raises_is_its_own() -> None:
    listener = Shown()
    with Fault(3, error=MemoryError("mine")).before(listener, "put"), pytest.raises(MemoryError, match="mine"):
        speculative("llama", 1, streamer=listener)
    assert_undisturbed("llama", "chain", 1)


DRAFTED = {
    "verify": ("before", lambda _, tree, *rest: drafted_oddly(tree)),
    "accept": ("before", lambda _, tree, *rest: drafted_oddly(tree)),
    "accepted": ("after", lambda _, tree, *rest: drafted_oddly(tree)),
    "keep": ("before", lambda _, paths: 1 < max(map(len, paths)) <= 4),  # a prompt has more
    "absorb": ("before", lambda _, tokens, *rest: tokens.shape[1] > 1),
    "draft step": ("before", lambda *_: True),
    "first token": ("after", lambda *_: True),
}
"""Where memory runs out by what was drafted, or by what of it was accepted."""


def drafted_oddly(tree: DraftTree) -> bool:
    return tree.size > 1 and bool((tree.tokens[:, 1] % 2 == 1).any())


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", DRAFTED)
@pytest.mark.thorough(every=2)
def test_what_was_drafted_when_memory_ran_out_decides_about_no_draw(place: str, shape: str, times: int) -> None:
    """A repeated round that drew anew would have fewer of the tokens that had been drafted before it."""
    when, holds = DRAFTED[place]
    method = METHODS["accept" if place == "accepted" else place]
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 16}
    raised = 0
    with configured(drafter_of("llama"), **SHAPES[shape]):
        for batch, seed in ((1, 1), (1, 2), (3, 3)):
            inputs = prompts_of(batch)
            with seeded(seed):
                wanted, then = target_of("llama").generate(**inputs, **sampled), torch.rand(1)
            fault = Fault(times=1 if place == "first token" else times, holds=holds)
            with (
                oracle_drafts(wanted, inputs["input_ids"].shape[1], seed=seed),
                getattr(fault, when)(*method),
                seeded(seed),
            ):
                text = target_of("llama").generate(**inputs, assistant_model=drafter_of("llama"), **sampled)
                assert torch.equal(torch.rand(1), then), "the next call goes on elsewhere"
            assert torch.equal(text, wanted)
            raised += fault.raised
    assert raised >= 2


TURN = {"return_dict_in_generate": True, "max_new_tokens": 6, "do_sample": False}


def two_turns(disturbance: Any) -> list[list[int]]:
    """Text of two turns over one cache, the first one disturbed, and of one more that starts from what is left."""
    target, drafter = target_of("llama"), drafter_of("llama")
    ids, cache, texts = prompts_of(1)["input_ids"], hf.DynamicCache(config=target.config), []
    for turn in range(3):
        with disturbance if turn == 1 else nullcontext():
            output = target.generate(ids, past_key_values=cache, assistant_model=drafter, **TURN)
        texts.append(output.sequences[0].tolist())
        ids = torch.cat((output.sequences, torch.tensor([[7, 8, 9]])), dim=1)
    return texts


@pytest.mark.parametrize(
    ("owner", "name", "times", "step"),
    [
        (CarriedCache, "load", 1, FREED),
        (CarriedCache, "close", 1, NOT_HANDED_OVER),
        (DraftSession, "_absorb", 10**6, DROPPED),
        (SpeculativeCache, "keep", 1, FREED),
    ],
)
def test_a_conversation_goes_on(owner: Any, name: str, times: int, step: str) -> None:
    taken: list[dict[str, int]] = []
    finish = SpeculativeDecoder.finish

    def finishing(self: SpeculativeDecoder) -> Tensor:
        taken.append(self.request.stats.memory_steps)
        return finish(self)

    with mock.patch.object(SpeculativeDecoder, "finish", finishing):
        assert two_turns(Fault(times=times).before(owner, name)) == two_turns(nullcontext())
    assert not taken[0]
    assert step in taken[1]
