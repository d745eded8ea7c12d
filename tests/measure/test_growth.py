"""How a round grows with its context: time, attention, storages."""

import json

import growth
import pytest
import torch
import typer
from growth import AttentionClock, GrowthRecord, measure_growth
from small_loops import CHAIN, TREE, tensors
from storages import count_storages
from typer.testing import CliRunner

from eagle31_hf.errors import ConfigurationError
from eagle31_hf.measure.methods import left_padded
from eagle31_hf.measure.synthetic import SyntheticRequest, write_synthetic
from helpers import drafter_of, random_prompts


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_keep_nothing_and_attention_is_found(drafter, shape):
    (first, longer) = measure_growth(drafter, shape, (8, 70), rounds=2)
    assert (first.context, longer.context) == (8, 70)
    assert first.allocates_steadily
    assert longer.allocates_steadily
    # The same after any context, but for a rotary table, which not every round makes.
    assert longer.round_bytes == pytest.approx(first.round_bytes, rel=0.05)
    assert first.round_bytes > 0
    assert first.attention_s > 0


def test_a_round_that_hoards_is_noticed():
    hoard = []
    steady = count_storages(lambda: torch.ones(1000).sum(), 4)
    assert steady.round_bytes >= 4000
    assert steady.kept_bytes == 0
    hoarding = count_storages(lambda: hoard.append(torch.ones(1000)), 4)
    assert hoarding.kept_bytes == 4 * 4000 > hoarding.round_bytes


def test_attention_of_target_and_drafter_is_caught(drafter):
    prompts = left_padded(tensors(random_prompts(1)), 0)
    clock, kernel = AttentionClock(torch.device("cpu")), torch.nn.functional.scaled_dot_product_attention
    with clock.running():
        write_synthetic(drafter, prompts, SyntheticRequest(2, CHAIN, (1.0,)))
    assert torch.nn.functional.scaled_dot_product_attention is kernel, "it is put back"
    assert clock.seconds > 0
    # Prefill by target and drafter, one round without drafts, before which the drafter need not read the first token.
    assert clock.calls == 4 + 1 + 4


def test_rounds_can_be_taken_without_attention(drafter, monkeypatch):
    prompts = left_padded(tensors(random_prompts(1)), 0)
    kernel, asked = torch.nn.functional.scaled_dot_product_attention, []
    watched = lambda *args, **kwargs: asked.append(1) or kernel(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    clock = AttentionClock(torch.device("cpu"), absent=True)
    with clock.running():
        write_synthetic(drafter, prompts, SyntheticRequest(2, CHAIN, (1.0,)))
    assert clock.calls == 4 + 1 + 4
    assert not asked


def test_growth_is_against_the_first_context():
    first, later = GrowthRecord(8, 0.010, 0.002, 0.008, 1, 0), GrowthRecord(80, 0.020, 0.010, 0.010, 1, 2)
    assert growth.growth(first, later) == pytest.approx(0.25)
    assert (first.allocates_steadily, later.allocates_steadily) == (True, False)
    with pytest.raises(ConfigurationError):
        measure_growth(drafter_of("llama"), CHAIN, ())


def command(*arguments):
    study = typer.Typer()
    study.command()(growth.main)
    return CliRunner().invoke(study, arguments, env={"COLUMNS": "100"})


def test_the_study_ends_with_its_figures():
    out = command("--contexts", "6,9", "--rounds", "1", "--tree-width", "2", "--tree-size", "8").stdout
    last = json.loads(out.splitlines()[-1])
    assert [r["context"] for r in last["records"]] == [6, 9]
    assert last["records"][0]["growth"] == 0


def test_a_context_too_short_is_one_line():
    told = command("--contexts", "1")
    assert told.exit_code == 1
    assert "wanted 2 tokens" in told.stderr
