"""What is drafted where nothing is asked for, and how long drafts pay by the bytes that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LogitsProcessorList, Qwen3MoeConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafting.shape import LONGEST_CHAIN, LONGEST_OF_GRAPHS, USUAL_TREE, DraftShape
from eagle31_hf.graphs import captured
from eagle31_hf.loop.pair import Pair, draft_shape, longest_worthwhile, step_share
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from helpers import CONFIGS, configured, drafter_of, random_drafter, random_target
from mtp_targets import target_with_head


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
    plan = drafts.planner.next_draft([0], None, 64)
    assert (drafts.shape.min_confidence, plan.shape.min_confidence) == (0.9, 0.9)


# --- by bytes: against counting by hand, and against trying every length ----------------------------------------------


def test_a_step_reads_layers_and_head() -> None:
    drafter = random_drafter(random_target(CONFIGS["llama"]()), aux_layers=[1, 2, 4])
    model = drafter.binding.model
    head = drafter.head_weights
    step = sum(each.nbytes for each in [*drafter.layers.parameters(), *head])
    assert step_share(drafter) == step / sum(each.nbytes for each in [*model.model.layers.parameters(), *head])


def test_experts_that_a_token_is_not_sent_to_are_not_read() -> None:
    shape = CONFIGS["llama"]().to_diff_dict()
    config = Qwen3MoeConfig(**(shape | {"model_type": "qwen3_moe"}), num_experts=8, num_experts_per_tok=2)
    target = random_target(config)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    layers, sent_to = target.model.layers, 0.25
    experts = sum(each.nbytes for each in layers.parameters() if each.dim() == 3)
    others = sum(each.nbytes for each in [*layers.parameters(), *target.lm_head.parameters()]) - experts
    step = sum(each.nbytes for each in [*drafter.layers.parameters(), *drafter.head_weights])
    assert experts > 0
    assert step_share(drafter) == pytest.approx(step / (others + sent_to * experts))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.15, 0.3, 1.5])
@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
def test_the_length_that_writes_fastest(share: float, acceptance: float) -> None:
    speeds = [sum(acceptance**n for n in range(depth + 1)) / (1 + depth * share) for depth in range(1, 13)]
    assert longest_worthwhile(share, acceptance, longest=12) == 1 + speeds.index(max(speeds))


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_a_step_of_a_head_reads_its_projection_and_the_experts_a_token_is_sent_to(family, tmp_path):
    target = target_with_head(family, tmp_path)
    head = Eagle31Drafter.from_pretrained(tmp_path, target=target, draft_vocab_size=40)
    experts, others = 0, 0
    for parameter in head.layers.parameters():
        if parameter.dim() == 3:
            experts += parameter.nbytes
        else:
            others += parameter.nbytes
    width = target.config.hidden_size
    step = others + experts / 2 + 4 * (2 * width * width + 40 * width)  # two experts of four; fp32
    layers = [*target.model.layers.parameters(), target.lm_head.weight]
    read = sum(each.nbytes / (2 if each.dim() == 3 and experts else 1) for each in layers)
    assert step_share(head) == pytest.approx(step / read)
    assert (experts > 0) == (family == "glm4_moe")
