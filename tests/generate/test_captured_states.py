"""Captured rounds over targets whose layers keep states: plain's text, from states that stay where they are.

The stand-in for recording is that of `test_captured_steps`. Targets remember long (`recurrent_target`) and drafts are
right for a while, so that a state that is not moved on, or is moved too far, shows in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from kept_pairs import GREEDY, SAMPLING, failing, kinds
from torch import Tensor
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.drafter.assistant import NoDrafter
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs.captured import CapturesSteps
from eagle31_hf.graphs.steps import GraphKey, Step, tensors_in
from eagle31_hf.graphs.verify import CompiledVerification
from eagle31_hf.loop.pair import Pair
from families import recurrent_target
from helpers import VOCABULARY, assert_same_text, configured, left_padded, random_drafter
from recorder import Recorder

TAPED = ("qwen3_5_text", "bamba", "nemotron_h", "lfm2")
"""Two of Mamba 2, one of which has layers that keep nothing, a gated delta net, and convolutions alone."""
CHAIN_OF_5: dict[str, Any] = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
SETTINGS: dict[str, Any] = CHAIN_OF_5 | {"speculation_loop": "own"}


@cache
def target_of(family: str) -> Any:
    return recurrent_target(family)


@pytest.fixture
def make_pair(request: pytest.FixtureRequest) -> Callable[[str], Eagle31Drafter]:
    """Fresh drafters: graphs are a pair's."""

    def make(family: str) -> Eagle31Drafter:
        drafter = random_drafter(target_of(family), aux_layers=[1, 2, 3])
        for name, value in SETTINGS.items():
            setattr(drafter.generation_config, name, value)
        request.addfinalizer(drafter.detach)
        return drafter

    return make


def prompts(lengths: Sequence[int], seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return left_padded([torch.randint(3, VOCABULARY, (n,), generator=dice).tolist() for n in lengths])


def assert_plain(
    drafter: Eagle31Drafter, seed: int = 0, lengths: Sequence[int] = (12,), new_tokens: int = 32, **how: Any
) -> None:
    """Our loop's text is plain's, by drafts that are right for as long in every text."""
    call = {"max_new_tokens": new_tokens, "pad_token_id": 0, **GREEDY, **how}
    assert_same_text(drafter.binding.model, drafter, prompts(lengths, seed), seed=seed, oracle=0, **call)


def assert_captured(drafter: Eagle31Drafter, recorder: Recorder) -> None:
    assert drafter.stats.fallbacks == []
    assert {"verify", "advance"} <= kinds(drafter)
    assert recorder.replayed


@pytest.mark.parametrize("how", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", TAPED)
def test_three_texts_of_which_the_first_one_records(
    family: str, how: dict[str, Any], make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder
) -> None:
    drafter = make_pair(family)
    for seed in range(3):
        assert_plain(drafter, seed, **how)
        assert_captured(drafter, recorder)
        graphs = Pair.of(drafter).graphs.keys
        assert recorder.recorded == len(graphs), "each once: what the next text needs lies where it was"
        sizes = {(key.kind, key.size) for key in graphs}
        assert ("verify", 6) in sizes
        assert (("settle", 6) in sizes) == (family != "lfm2"), "a convolution's next window is a part of what is there"


def test_a_state_that_is_not_moved_on_shows(
    make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: committed states stay those of the prompt."""
    for family in ("qwen3_5_text", "bamba"):
        drafter = make_pair(family)
        assert_plain(drafter)
        with monkeypatch.context() as patch:
            patch.setattr(CompiledVerification, "_settle_states", lambda verification, layers, last: None)
            for seed in range(2):
                with pytest.raises(AssertionError, match="wanted"):
                    assert_plain(drafter, seed)
        assert_captured(drafter, recorder)


@pytest.mark.parametrize("kind", ["verify", "settle"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_graph_that_spoils_a_state_is_given_up(
    kind: str,
    family: str,
    make_pair: Callable[[str], Eagle31Drafter],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose logits are right and whose states are not: the next round's text would be another one."""
    make = CapturesSteps.make

    def make_spoiling(maker: CapturesSteps, key: GraphKey, *given: Any) -> Step:
        made = make(maker, key, *given)

        def spoiling(*given: Any) -> Any:
            output = made(*given)
            state = output[-1] if kind == "settle" else next(tensors_in(output.traces[-1]))
            state.mul_(1.5)
            return output

        return spoiling if key.kind == kind else made

    monkeypatch.setattr(CapturesSteps, "make", make_spoiling)
    drafter = make_pair(family)
    assert_plain(drafter)
    (why,) = drafter.stats.fallbacks
    assert "capturing failed, steps stay eager: ArithmeticError: the compiled step is off by" in why


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "mamba2"])
def test_rows_of_unlike_length(family: str, make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder) -> None:
    """Each row keeps its own number of drafts; those that have ended stand still. Numbers are what a graph is told."""
    drafter = make_pair(family)
    for seed in range(3):
        assert_plain(drafter, seed, (5, 1, 14))
        assert_captured(drafter, recorder)
        graphs = Pair.of(drafter).graphs.keys
        assert recorder.recorded == len(graphs), "each once"
        assert ("settle", 3, 6) in {key[:3] for key in graphs}


def test_single_tokens(recorder: Recorder) -> None:
    """The model alone, by graphs: states after one token are those of the node it is."""
    for family in ("qwen3_5_text", "bamba", "lfm2"):
        alone, inputs, before = NoDrafter(target_of(family)), prompts((9,), 0), recorder.replayed
        for schedule, sizes in (("constant", {1}), ("planned", set(range(1, 12)))):
            with configured(alone, num_assistant_tokens_schedule=schedule):
                call = {"max_new_tokens": 32, "pad_token_id": 0, **GREEDY}
                plain = target_of(family).generate(**inputs, **call)
                assert torch.equal(target_of(family).generate(**inputs, **call, assistant_model=alone), plain)
            assert alone.stats.fallbacks == []
            assert {key.size for key in Pair.of(alone).graphs.keys} <= sizes
        assert recorder.replayed > before + 20
        alone.detach()


def test_trees_are_drafted_as_captured_chains(make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder) -> None:
    drafter = make_pair("qwen3_5_text")
    with configured(drafter, draft_top_k=2, draft_tree_size=6):
        for seed in range(2):
            assert_plain(drafter, seed)
    assert {"verify", "advance"} <= kinds(drafter)
    (why,) = drafter.stats.fallbacks
    assert "trees are drafted as chains" in why
    assert recorder.replayed


def test_turns_go_on_from_what_was_handed_over(make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder) -> None:
    """The next text is written over the states of the last one, but not over those of a cache that somebody has."""
    drafter, inputs = make_pair("qwen3_5_text"), prompts((9,), 0)
    target, call = target_of("qwen3_5_text"), {"max_new_tokens": 20, "pad_token_id": 0, **GREEDY}
    past = {CACHE_ARGUMENT: DynamicCache(config=target.config)}
    first = target.generate(**inputs, **call, assistant_model=drafter, **past)
    assert_plain(drafter, 5)
    more = torch.cat((first, torch.tensor([[7, 8, 9]])), 1)
    second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    ours = target.generate(**second, **call, assistant_model=drafter, **past)
    assert torch.equal(ours, target.generate(**second, **call))
    assert_captured(drafter, recorder)


def test_a_text_goes_on_where_recording_anew_fails(
    make_pair: Callable[[str], Eagle31Drafter], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What states were to be moved on by is then left by the eager forward that takes the graph's place."""
    drafter = make_pair("qwen3_5_text")
    assert_plain(drafter)
    monkeypatch.setattr(Recorder, "__call__", failing(RuntimeError("operation not permitted when capturing")))
    assert_plain(drafter, 1, new_tokens=140)
    assert "operation not permitted" in drafter.stats.fallbacks[0]
