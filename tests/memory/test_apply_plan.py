"""A plan that is obeyed: made for where the target sits, checked before weights are read, set on the drafter, and kept
to by what then runs, with storages counted (`peak_runs`); with the head inside a target, too."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import BitsAndBytesConfig

from eagle31_hf import Eagle31Drafter, MemoryPlan, NoDrafter, plan_memory
from eagle31_hf.checkpoints import read_checkpoint, write_checkpoint
from eagle31_hf.drafter import drafter
from eagle31_hf.drafter.draft_rows import with_draft_rows, with_rows
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.drafting.shape import LONGEST_CHAIN, USUAL_TREE, DraftShape, noise_bytes
from eagle31_hf.errors import CheckpointFormatError, MemoryPlanError
from eagle31_hf.graphs import captured
from eagle31_hf.graphs.draft_graphs import GraphChoice
from eagle31_hf.graphs.round_graphs import RoundStep
from eagle31_hf.loop.pair import draft_shape
from eagle31_hf.loop.prefill import ChunkedPrefill
from eagle31_hf.memory.apply_plan import apply_plan, plan_to_apply, require_room
from eagle31_hf.memory.cards import GIB, MIB, Card
from eagle31_hf.memory.drafter_facts import DrafterFacts, read_drafter
from eagle31_hf.memory.dry_run import Forward, StorageCounter
from eagle31_hf.memory.ledger import RUNNING
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.memory.weights import SCHEMES, storage_bytes
from eagle31_hf.settings import Eagle31GenerationConfig
from helpers import DEMO_DRAFTER, PACKINGS, drafter_of, target_of
from mtp_targets import FAMILIES, target_with_head
from peak_runs import PeakRun, measure_peak, runs_on

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


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_only_what_is_made_meanwhile_is_counted() -> None:
    before = torch.ones(1000)
    with StorageCounter() as counter:
        before.add_(1).view(10, 100).narrow(0, 0, 5)
        assert counter.peak_bytes == 0, "was there before"
        made = before + 1
        rows = made.view(10, 100)[3:]
        assert counter.live_bytes == 4000, "a view is no storage of its own"
        listed = torch.tensor([1, 2, 3])
        assert counter.live_bytes == 4024, "made from a list"
        del made, rows
        assert counter.live_bytes == listed.nbytes
        assert counter.peak_bytes == 4024
        counter.restart_peak()
        assert counter.peak_bytes == 24
    del listed
    assert counter.live_bytes == 0, "what is let go later counts, too"


@pytest.mark.parametrize("run", runs_on("tiny", 544), ids=str)
@pytest.mark.thorough(every=4)
def test_small_runs_take_what_was_planned(run: PeakRun, roomy: Card) -> None:
    """Weights byte for byte. Peaks within a few per cent: at this size, ids and positions are seen beside the rest."""
    pytest.importorskip("bitsandbytes")
    record = measure_peak(run, run.to_plan(torch.bfloat16, roomy), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert record.planned_weights == record.measured_weights
    # Products with packed matrices are planned with a workspace that lies inside the kernel on a CPU.
    assert 0.99 <= record.ratio <= (1.02 if run.drafter_precision == "full" else 1.12), record


# --- the head inside a target: its weights, its keys and values, and what a run with it takes -------------------------

FP32 = SCHEMES["fp32"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return target_with_head(request.param, folder), folder


def facts_of(drafter: Any, target: Any) -> DrafterFacts:
    return read_drafter(drafter, read_target(target))


def test_weights_and_cache_are_those_of_the_loaded_head(pair) -> None:
    target, folder = pair
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    for given in (folder, drafter):
        facts = facts_of(given, target)
        assert facts.weight_bytes(FP32) == pytest.approx(storage_bytes(drafter), rel=0.02)
        assert facts.head_bytes(FP32) == 0, "the target's LM head is read in place"
    session = DraftSession(drafter, batch_size=1, capacity=64, block=9)
    width = target.config.hidden_size
    session.absorb(torch.arange(9)[None], torch.randn(1, 9, width), [9])
    kept = sum(layer.num_bytes for layer in session.cache.layers)
    assert facts.count(Forward(9, 64, block=session.cache.block)).cache == kept > 0


@pytest.mark.parametrize(("precision", "packed_as"), [("int8", "int8"), ("nf4", "nf4-dq")])
def test_a_packed_head_is_planned_as_it_is_packed(pair, precision: str, packed_as: str) -> None:
    pytest.importorskip("bitsandbytes")
    target, folder = pair
    plan = plan_memory(target, drafter=folder, context=64, drafter_precision=precision, card="RTX 4090")
    packing = BitsAndBytesConfig(**PACKINGS[packed_as])
    drafter = Eagle31Drafter.from_pretrained(folder, target=target, quantization_config=packing)
    (planned,) = [term.num_bytes for term in plan.ledger if term.name.startswith("drafter weights")]
    assert planned == pytest.approx(storage_bytes(drafter), rel=0.02)


def test_draft_rows_cost_what_is_copied_of_them(tmp_path: Path) -> None:
    target = target_with_head("qwen3_5_text", tmp_path / "target")
    head, width = read_checkpoint(tmp_path / "target"), target.config.hidden_size
    first, chosen = with_draft_rows(head, 40), with_rows(head, torch.arange(1, 81, 2))
    for name, saved, copied in (("first", first, 0), ("chosen", chosen, 40 * width * 4)):
        write_checkpoint(saved, tmp_path / name, format="mtp")
        drafter = Eagle31Drafter.from_pretrained(tmp_path / name, target=target)
        for given in (tmp_path / name, drafter):
            facts = facts_of(given, target)
            assert facts.head_bytes(FP32) == copied
            assert facts.draft_vocab == 40


def test_a_plan_takes_the_head_inside_the_target(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    target = target_with_head("glm4_moe_lite", folder)
    by_itself = plan_memory(folder, context=64, card="RTX 4090")
    asked = plan_memory(folder, drafter="mtp", context=64, card="RTX 4090")
    assert by_itself.drafter.name == asked.drafter.name == facts_of(folder, folder).name
    assert "MTP head" in by_itself.drafter.name
    target.save_pretrained(tmp_path / "tuned")
    assert "MTP head" not in plan_memory(tmp_path / "tuned", context=64, card="RTX 4090").drafter.name
    with pytest.raises(CheckpointFormatError, match="transformers drops them"):
        plan_memory(tmp_path / "tuned", drafter="mtp", context=64)


@pytest.mark.parametrize(
    ("name", "parameters", "cached"),
    # One layer of attention, gated (24 heads of 256, 4 of keys), and its MLP; `fc` of 2H x H. Norms are some thousands.
    [
        ("Qwen3.6 27B", 5120 * 256 * (3 * 24 + 2 * 4) + 3 * 5120 * 17408 + 2 * 5120**2, 2 * 4 * 256),
        # 256 experts, one that all tokens pass, and what chooses them.
        (
            "Qwen3.6 35B-A3B",
            2048 * 256 * (3 * 16 + 2 * 2) + (256 + 1) * 3 * 2048 * 512 + (256 + 1) * 2048 + 2 * 2048**2,
            2 * 2 * 256,
        ),
    ],
)
def test_targets_known_by_name_have_their_familys_head(name: str, parameters: int, cached: int) -> None:
    plan = plan_memory(name, card="RTX 4090", quantization="bnb-nf4-dq", context=8192)
    assert plan.drafter is not None
    assert "MTP head" in plan.drafter.name
    assert plan.drafter.weight_bytes(SCHEMES["bf16"]) == pytest.approx(2 * parameters, rel=0.001)
    assert plan.drafter.count(Forward(8, 1000, block=8)).cache == 1000 * cached * 2
    assert plan_memory(name, drafter="mtp", card="RTX 4090", context=64).drafter.name == plan.drafter.name


LARGER = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4000, "num_attention_heads": 4, "head_dim": 64,
          "num_key_value_heads": 2, "max_position_embeddings": 2048}  # fmt: skip
LATENT = {**LARGER, "num_key_value_heads": 4, "head_dim": 4}


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5_text", LARGER), ("glm4_moe_lite", LATENT)])
@pytest.mark.thorough(every=2)
def test_a_head_adds_what_is_planned(family: str, sizes: dict[str, int], tmp_path: Path, roomy: Card) -> None:
    """The same target with its head and without: weights, and the peak of the whole run."""
    target = target_with_head(family, tmp_path, **sizes)
    plans = [
        plan_memory(target, drafter=tmp_path, card=roomy, context=544, draft_tokens=drafts, prefill_chunk=256)
        for drafts in (6, 0)
    ]
    head, alone = Eagle31Drafter.from_pretrained(tmp_path, target=target, memory=plans[0]), NoDrafter(target)
    alone.generation_config.prefill_chunk_size = 256
    head.generation_config.num_assistant_tokens_schedule = "constant"
    ids = torch.randint(3, 4000, (1, 512), generator=torch.Generator().manual_seed(0))
    peaks = []
    for assistant in (head, alone):
        with StorageCounter() as counter:
            target.generate(ids, max_new_tokens=32, do_sample=False, assistant_model=assistant, pad_token_id=0)
        peaks.append(counter.peak_bytes)
    added = storage_bytes(head) + peaks[0] - peaks[1]
    planned = [max(plan.bytes_by_moment[moment] for moment in RUNNING) for plan in plans]
    assert planned[0] - planned[1] == pytest.approx(added, rel=0.02)
