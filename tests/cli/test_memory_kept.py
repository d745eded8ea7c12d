"""A plan that is asked for on the command line is printed, and what is then taken stays within it."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from eagle31_hf.cli import app, generate, pairs
from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair, make_plan
from eagle31_hf.drafter import loading
from eagle31_hf.drafting.shape import USUAL_TREE
from eagle31_hf.errors import MemoryPlanError
from eagle31_hf.memory import cards
from eagle31_hf.memory.apply_plan import apply_plan
from eagle31_hf.memory.cards import Card
from eagle31_hf.settings import Eagle31GenerationConfig
from peak_runs import StorageMeter

REPEATED = "What is the weather going to be like in Portland this weekend? " * 150


def test_a_packed_pair_answers_within_its_plan(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    prompt, record = tmp_path / "prompt.txt", tmp_path / "figures.json"
    prompt.write_text(REPEATED)
    peaks, stream = [], generate._stream

    def metered(console, pair, *args):
        meter = StorageMeter()
        meter.loaded(pair.target)
        meter.loaded(pair.drafter)
        peaks.append(meter.peak(lambda: stream(console, pair, *args)))

    monkeypatch.setattr(generate, "_stream", metered)
    told = CliRunner().invoke(
        app,
        ["generate", "--quantization", "4bit", "--memory", "auto", "--no-compare", "--max-new-tokens", "12",
         "--prompt-file", str(prompt), "--json", str(record)],
        env={"COLUMNS": "100"},
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "bnb-nf4-dq" in told.stdout
    assert told.stdout.index("fits") < told.stdout.index("assistant:")
    planned = json.loads(record.read_text())["plan"]["figures"]["peak_bytes"]
    assert 0.8 * planned < peaks[0] <= planned


@pytest.mark.parametrize("quick", [torch.bfloat16, torch.float32])
def test_a_plan_counts_weights_as_this_machine_loads_them(quick, monkeypatch):
    """Stored in bfloat16; a processor that has no arithmetic for it loads twice the bytes."""
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: quick)
    pair = load_pair(PairSource(memory="auto", context=256), DraftOptions(), batch=1)
    weights = sum(term.num_bytes for term in pair.plan.ledger if "weights" in term.name or "head" in term.name)
    held = {p.data_ptr(): p.nbytes for model in (pair.target, pair.drafter) for p in model.parameters()}
    assert pair.target.dtype is quick
    assert 0.98 * sum(held.values()) < weights


@pytest.mark.parametrize(
    "asked",
    [
        {"tree_width": 1}, {"tree_width": 3}, {"tree_width": 3, "draft_tokens": 2}, {"tree_width": 4, "tree_size": 9},
    ],
)  # fmt: skip
def test_a_plan_knows_the_tree_that_is_asked_for(asked):
    """By its width alone, too: what is then drafted is what would be without a plan."""
    drafting, shapes = DraftOptions(**asked), []
    plan = make_plan(PairSource(memory="auto", card=["RTX A6000"]), drafting, batch=1)
    for planned in (None, plan):
        settings = Eagle31GenerationConfig()
        if planned is not None:
            apply_plan(planned, settings)
        drafting.apply_to(SimpleNamespace(generation_config=settings, check_settings=settings.check))
        shapes.append(settings.draft_shape(device_type="cuda", rows=1, by_graphs=USUAL_TREE))
    alone, drafted = shapes
    assert drafted == alone
    assert drafted == plan.settings.shape if drafted.is_tree else drafted.nodes <= plan.settings.shape.nodes


@pytest.mark.parametrize("drafter", [None, "none"])
def test_a_plan_for_a_larger_card_is_refused_before_anything_is_loaded(drafter, monkeypatch):
    monkeypatch.setattr(pairs, "load_target", None)
    monkeypatch.setattr(pairs, "measure_card", lambda _device: Card("a small machine", "cpu", 2**25, 2**25))
    with pytest.raises(MemoryPlanError, match="a small machine has"):
        load_pair(PairSource(drafter=drafter, memory="auto", card=["999 GiB"]))


def test_a_plan_is_for_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(cards, "best_kind", lambda: "cuda")  # a machine with a card
    assert make_plan(PairSource(memory="auto", device="cpu"), DraftOptions(), batch=1).card.kind == "cpu"
