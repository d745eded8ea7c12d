"""A plan that is obeyed: made for where the target sits, checked before weights are read, set on the drafter."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter, MemoryPlan, plan_memory
from eagle31_hf.drafter import drafter
from eagle31_hf.drafting.shape import LONGEST_CHAIN, USUAL_TREE, DraftShape, noise_bytes
from eagle31_hf.errors import MemoryPlanError
from eagle31_hf.graphs import captured
from eagle31_hf.graphs.draft_graphs import GraphChoice
from eagle31_hf.graphs.round_graphs import RoundStep
from eagle31_hf.loop.pair import draft_shape
from eagle31_hf.loop.prefill import ChunkedPrefill
from eagle31_hf.memory.apply_plan import apply_plan, plan_to_apply, require_room
from eagle31_hf.memory.cards import GIB, MIB, Card
from eagle31_hf.settings import Eagle31GenerationConfig
from helpers import DEMO_DRAFTER, drafter_of, target_of

IDS = torch.randint(3, 400, (1, 70), generator=torch.Generator().manual_seed(0))
ROOMY = Card("main memory", "cpu", 64 * GIB, 64 * GIB, measured=True)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> Card:
    """This machine, with memory enough whatever else runs on it."""
    monkeypatch.setattr("eagle31_hf.memory.apply_plan.measure_card", lambda _device=None: ROOMY)
    return ROOMY


def load(**arguments: Any) -> Eagle31Drafter:
    return Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target_of("demo-target"), **arguments)


def planned(**settings: Any) -> MemoryPlan:
    return plan_memory(target_of("demo-target"), drafter=DEMO_DRAFTER, **{"card": ROOMY, **settings})


def test_auto_plans_for_where_the_target_sits(roomy: Card) -> None:
    eagle = load(memory="auto")
    plan = eagle.memory_plan
    assert plan is not None
    assert plan.card is roomy
    assert plan.fits
    assert plan.settings.context == target_of("demo-target").config.max_position_embeddings
    settings = eagle.generation_config
    settings.check()
    assert (settings.num_assistant_tokens, settings.draft_top_k, settings.draft_tree_size) == (None, None, None)
    assert plan.settings.draft_tokens == LONGEST_CHAIN
    assert (settings.prefill_chunk_size, settings.cache_type) == (plan.settings.prefill_chunk, "full")
    with mock.patch.object(target_of("demo-target").generation_config, "max_length", 333):
        assert plan_to_apply("auto", target_of("demo-target"), DEMO_DRAFTER).settings.context == 333


def test_what_is_usual_is_drafted_under_a_plan_as_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card: trees for a sampled text, of nodes that the plan has room for."""
    card = Card("a card", "cuda", 24 * GIB, 24 * GIB)
    target = target_of("demo-target")
    plan = plan_memory(target, drafter=DEMO_DRAFTER, card=card)
    settings, eagle = Eagle31GenerationConfig(), load()
    apply_plan(plan, settings)
    monkeypatch.setitem(captured.CAPTURES, "cpu", None)
    for planned_for in (None, plan):
        eagle.memory_plan = planned_for
        drafted = [draft_shape(eagle, rows=1, sampled=sampled, by_graphs=True) for sampled in (True, False)]
        assert [shape.is_tree for shape in drafted] == [True, False]
    for shape in drafted:
        assert shape.nodes <= plan.settings.shape.nodes == USUAL_TREE.nodes
        assert shape.depth <= plan.settings.draft_tokens
        assert shape.draft_block <= plan.settings.shape.draft_block
    eagle.memory_plan = replace(plan, settings=replace(plan.settings, draft_tokens=2))
    assert draft_shape(eagle, rows=1, sampled=False, by_graphs=True).depth <= 2


def test_a_plan_is_kept_by_the_loop(roomy: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(prefill_chunk=32, draft_tokens=2, tree_size=8, context=128)
    eagle, widths, forward = load(memory=plan), [], ChunkedPrefill._forward
    assert eagle.memory_plan == plan

    def measured(self: ChunkedPrefill, columns: Tensor, *told: Any) -> Any:
        widths.append(columns.shape[1])
        return forward(self, columns, *told)

    monkeypatch.setattr(ChunkedPrefill, "_forward", measured)
    target = target_of("demo-target")
    text = target.generate(IDS, assistant_model=eagle, max_new_tokens=12, do_sample=False)
    assert widths == [32, 32, 6]
    assert torch.equal(text, target.generate(IDS, max_new_tokens=12, do_sample=False))
    assert eagle.stats is not None
    assert len(eagle.stats.drafted_at) <= 2
    assert not eagle.stats.fallbacks
    target.generate(IDS, assistant_model=eagle, max_new_tokens=2, do_sample=False, prefill_chunk_size=50)
    assert widths[3:] == [50, 20], "the call's own setting comes first"


def test_obeying_sets_every_setting_a_plan_decides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "eagle31_hf")
    settings = Eagle31GenerationConfig()
    apply_plan(planned(draft_tokens=3, tree_size=12, prefill_chunk=256, cache_type="int8", context=128), settings)
    settings.check()
    assert (settings.num_assistant_tokens, settings.draft_top_k, settings.draft_tree_size) == (3, 2, 12)
    assert (settings.prefill_chunk_size, settings.cache_type) == (256, "int8")
    assert "may change the text" in caplog.text


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_the_drafter_is_packed_as_planned(roomy: Card, precision: str) -> None:
    pytest.importorskip("bitsandbytes")
    eagle = load(memory=planned(drafter_precision=precision))
    assert eagle.packing is not None
    assert eagle.packing.method == f"bnb-{precision}"


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse(match: str, **arguments: Any) -> None:
    """Refused, and before the drafter's weights are read."""
    with mock.patch.object(drafter, "read_checkpoint") as read, pytest.raises(MemoryPlanError, match=match):
        Eagle31Drafter.from_pretrained(DEMO_DRAFTER, **arguments)
    read.assert_not_called()


REFUSED: dict[str, tuple[str, str | None, dict[str, Any] | str]] = {
    "no target": ("pass target=", None, "auto"),
    "another target": ("made for", "llama", {}),
    "no drafter": ("no room for a drafter", "demo-target", {"draft_tokens": 0}),
    "no plan": ("wanted 'auto'", "demo-target", "yes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_of_something_else_is_refused(what: str, roomy: Card) -> None:
    match, target, settings = REFUSED[what]
    loaded = None if target is None else target_of(target)
    refuse(match, target=loaded, memory=settings if isinstance(settings, str) else planned(**settings))


@pytest.mark.parametrize("is_auto", [True, False])
def test_too_little_free_memory_is_said_with_the_ledger(monkeypatch: pytest.MonkeyPatch, is_auto: bool) -> None:
    full = replace(ROOMY, usable_bytes=ROOMY.default_margin_bytes + 30 * MIB)  # the target alone takes 44
    monkeypatch.setattr("eagle31_hf.memory.apply_plan.measure_card", lambda _device=None: full)
    refuse(
        r"free for it. Planned at the peak \(.*\): .*target weights.*MiB",
        target=target_of("demo-target"),
        memory="auto" if is_auto else planned(),
    )


def test_a_target_on_several_devices_is_refused() -> None:
    places = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:1", "meta")]
    target: Any = SimpleNamespace(parameters=lambda: iter(places))
    with pytest.raises(MemoryPlanError, match="cuda:0, cuda:1"):
        plan_to_apply("auto", target, DEMO_DRAFTER)


def test_the_runtime_of_a_measured_card_is_not_counted_twice() -> None:
    plan = planned()
    table = replace(ROOMY, context_bytes=GIB, measured=False)
    on_table = replace(plan, card=table)
    exactly = replace(ROOMY, usable_bytes=plan.peak_bytes + plan.margin_bytes)
    assert on_table.peak_bytes == plan.peak_bytes + GIB
    require_room(on_table, exactly)
    with pytest.raises(MemoryPlanError):
        require_room(on_table, replace(exactly, usable_bytes=exactly.usable_bytes - 1))


@pytest.mark.parametrize(("kind", "ahead"), [("cuda", 13), ("cpu", 7)])
def test_noise_is_planned_as_far_as_a_round_looks_ahead(kind: str, ahead: int) -> None:
    """A graph accepts and drafts again at once."""
    card = Card("a card", kind, 24 * GIB, 24 * GIB)
    plan = plan_memory(target_of("demo-target"), drafter=DEMO_DRAFTER, card=card, draft_tokens=6)
    (noise,) = [term.num_bytes for term in plan.ledger if term.name == "sampling noise"]
    assert noise == noise_bytes(1, plan.target.vocab_size, ahead)
    drafter = drafter_of("llama")
    graph = RoundStep(drafter, DraftShape(6), GraphChoice(draws=True, warping=None))
    assert graph.looks_ahead == 13
