"""Captured rounds over targets whose layers keep states: plain's text, from states that stay where they are.

The stand-in for recording is that of `test_captured_steps`. Targets remember long (`recurrent_target`) and drafts are
right for a while, so that a state that is not moved on, or is moved too far, shows in the text. What other families
write by captured steps is in `tests/contract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kept_pairs import GREEDY, SAMPLING, failing, kinds, settle
from transformers import DynamicCache

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.drafter.assistant import NoDrafter
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs.captured import CapturesSteps
from eagle31_hf.graphs.steps import GraphKey, Step, tensors_in
from eagle31_hf.graphs.verify import CompiledVerification
from eagle31_hf.loop.pair import Pair
from families import recurrent_target
from helpers import assert_same_text, configured, prompts_of, random_drafter, write
from recorder import Recorder

TAPED = ("qwen3_5_text", "bamba", "nemotron_h", "lfm2")
"""Two of Mamba 2, one of which has layers that keep nothing, a gated delta net, and convolutions alone."""


def make_pair(family: str) -> Eagle31Drafter:
    return settle(random_drafter(recurrent_target(family), aux_layers=[1, 2, 3]))


def assert_plain(drafter: Eagle31Drafter, seed: int = 0, lengths: Sequence[int] = (12,), **how: Any) -> None:
    """Our loop's text is plain's, by drafts that are right for as long in every text."""
    how = {"max_new_tokens": 32, **how}
    assert_same_text(drafter.binding.model, drafter, prompts_of(lengths, seed), seed=seed, oracle=0, **how)


def assert_captured(drafter: Eagle31Drafter, recorder: Recorder) -> None:
    assert drafter.stats.fallbacks == []
    assert {"verify", "advance"} <= kinds(drafter)
    assert recorder.replayed


@pytest.mark.parametrize(
    ("how", "lengths"), [(GREEDY, [12]), (SAMPLING, [5, 1, 14])], ids=["greedy", "sampled, rows of unlike length"]
)
@pytest.mark.parametrize("family", [*TAPED, "falcon_h1", "mamba2"])
def test_three_texts_of_which_the_first_one_records(
    family: str, how: dict[str, Any], lengths: list[int], recorder: Recorder
) -> None:
    """Each row keeps its own number of drafts; those that have ended stand still. Numbers are what a graph is told."""
    drafter = make_pair(family)
    for seed in range(3):
        assert_plain(drafter, seed, lengths, **how)
        assert_captured(drafter, recorder)
        graphs = Pair.of(drafter).graphs.keys
        assert recorder.recorded == len(graphs), "each once: what the next text needs lies where it was"
        sizes = {(key.kind, key.rows, key.size) for key in graphs}
        assert ("verify", len(lengths), 4) in sizes
        settles = ("settle", len(lengths), 4) in sizes
        assert settles == ((family, lengths) != ("lfm2", [12])), (
            "a convolution's next window is a part of what is there"
        )


def test_a_state_that_is_not_moved_on_shows(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
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
    kind: str, family: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
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
    assert (
        "a graph computes something else than the model, steps stay eager: ArithmeticError: the compiled step is off by"
        in why
    )


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_single_tokens(family: str, recorder: Recorder) -> None:
    """The model alone, by graphs: states after one token are those of the node it is."""
    alone = NoDrafter(recurrent_target(family))
    for schedule, sizes in (("constant", {1}), ("planned", set(range(1, 12)))):
        with configured(alone, num_assistant_tokens_schedule=schedule):
            assert_same_text(alone.binding.model, alone, prompts_of([9]), max_new_tokens=32)
        assert alone.stats.fallbacks == []
        assert {key.size for key in Pair.of(alone).graphs.keys} <= sizes
    assert recorder.replayed > 20


def test_turns_go_on_from_what_was_handed_over(recorder: Recorder) -> None:
    """The next text is written over the states of the last one, but not over those of a cache that somebody has."""
    drafter = make_pair("qwen3_5_text")
    target, call = drafter.binding.model, {"max_new_tokens": 20}
    past = {CACHE_ARGUMENT: DynamicCache(config=target.config)}
    first = write(target, prompts_of([9]), assistant_model=drafter, **call, **past)
    assert_plain(drafter, 5)
    more = torch.cat((first, torch.tensor([[7, 8, 9]])), 1)
    second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    ours = write(target, second, assistant_model=drafter, **call, **past)
    assert torch.equal(ours, write(target, second, **call))
    assert_captured(drafter, recorder)


def test_a_text_goes_on_where_recording_anew_fails(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What states were to be moved on by is then left by the eager forward that takes the graph's place."""
    drafter = make_pair("qwen3_5_text")
    assert_plain(drafter)
    monkeypatch.setattr(Recorder, "__call__", failing(RuntimeError("operation not permitted when capturing")))
    assert_plain(drafter, 1, max_new_tokens=140)
    assert "operation not permitted" in drafter.stats.fallbacks[0]
