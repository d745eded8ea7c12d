"""What is drafted where nobody asks for anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LogitsProcessorList

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafting.plan import RoundState
from eagle31_hf.drafting.shape import LONGEST_CHAIN, LONGEST_OF_GRAPHS, USUAL_TREE, DraftShape
from eagle31_hf.graphs import captured
from eagle31_hf.loop.pair import Pair, draft_shape
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from helpers import CONFIGS, configured, drafter_of, random_drafter, random_target


def drafted(drafter: Eagle31Drafter, *, rows: int = 1, sampled: bool = True, by_graphs: bool = True) -> DraftShape:
    return draft_shape(drafter, rows=rows, sampled=sampled, by_graphs=by_graphs)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where steps are captured."""
    monkeypatch.setitem(captured.CAPTURES, "cpu", None)
    return


def test_graphs_draft_trees_for_a_sampled_text() -> None:
    drafter = drafter_of("llama")
    assert drafted(drafter) == USUAL_TREE
    assert drafted(drafter, sampled=False) == DraftShape(LONGEST_OF_GRAPHS)
    assert USUAL_TREE.nodes == LONGEST_OF_GRAPHS + 1, "or another verification would be compiled"
    assert drafted(drafter, by_graphs=False).depth == LONGEST_CHAIN
    assert not drafted(drafter, rows=2).is_tree


@pytest.mark.parametrize(
    "told",
    [
        {"draft_top_k": 1}, {"num_assistant_tokens": 5}, {"draft_min_confidence": 0.1},
        {"num_assistant_tokens_schedule": "pid"},
    ],
)  # fmt: skip
def test_who_asks_for_something_gets_chains(told: dict[str, Any]) -> None:
    with configured(drafter_of("llama"), **told) as drafter:
        assert not drafted(drafter).is_tree


def test_a_card_drafts_as_deep_as_its_bytes_say(on_a_card: None) -> None:
    drafter = random_drafter(random_target(CONFIGS["llama"]()), aux_layers=[1, 2, 4])
    greedy = drafted(drafter, sampled=False)
    assert not greedy.is_tree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle31_hf.loop.pair.longest_worthwhile", lambda *_, **__: 4)
        assert drafted(drafter) == DraftShape(4, top_k=2, size=8)
        drafter.binding.model.hf_quantizer = object()
        assert drafted(drafter) == DraftShape(4), "packed weights make a product dearer with its rows"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle31_hf.loop.pair.longest_worthwhile", lambda *_, **__: 1)
        del drafter.binding.model.hf_quantizer
        assert drafted(drafter) == DraftShape(1)


def test_layers_that_keep_states_verify_chains(on_a_card: None) -> None:
    drafter = random_drafter(random_target(CONFIGS["llama"]()), aux_layers=[1, 2, 4])
    drafter.binding.has_states = True
    assert not drafted(drafter).is_tree


@pytest.mark.parametrize("schedule", ["planned", "pid", "constant"])
def test_a_doubt_that_is_asked_for_ends_chains(schedule: str) -> None:
    asked = {"num_assistant_tokens_schedule": schedule, "draft_min_confidence": 0.9}
    with configured(drafter_of("llama"), acceleration="eager", **asked) as drafter:
        processing = ScoreProcessing(LogitsProcessorList())
        drafts = Pair.of(drafter).drafting(rows=1, sampled=False, processing=processing, new_tokens=64)
    plan = drafts.planner.next_draft(RoundState(drafts.shape, [0], None, 64))
    assert (drafts.shape.min_confidence, plan.shape.min_confidence) == (0.9, 0.9)
