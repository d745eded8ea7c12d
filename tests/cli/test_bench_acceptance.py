"""`eagle31 bench acceptance`: two drafters on the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli import app
from eagle31_hf.demo import drafter_path
from helpers import seeded


def test_a_damaged_drafter_accepts_less_on_the_same_texts(tmp_path: Path) -> None:
    damaged = Eagle31Drafter.from_pretrained(drafter_path(), dtype=torch.float32)
    with seeded(0), torch.no_grad():
        weight = damaged.fc.weight
        weight.add_(2 * weight.std() * torch.randn_like(weight))
    damaged.save_pretrained(tmp_path / "damaged")
    arguments = [str(drafter_path()), str(tmp_path / "damaged"), "--new-tokens", "24", "--draft-tokens", "4"]
    options = ["--dtype", "fp32", "--json", str(tmp_path / "figures.json")]
    result = CliRunner().invoke(app, ["bench", "acceptance", *arguments, *options])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())["drafters"]
    assert [(each["temperature"], each["ratio"] is None) for each in figures] == [(0, 1), (0, 0), (1, 1), (1, 0)]
    for ours, theirs in (figures[:2], figures[2:]):
        assert theirs["ratio"] < 0.97
        assert theirs["ratio"] == theirs["length"] / ours["length"]
        assert theirs["ratio_interval"][0] <= theirs["ratio"] <= theirs["ratio_interval"][1]
        assert len(ours["accepted_at"]) == 4
        assert ours["accepted_at"] == sorted(ours["accepted_at"], reverse=True)
    assert "temperature 1, chains of 4" in result.stdout


def test_trees_are_gone_through_on_the_same_texts() -> None:
    arguments = [str(drafter_path()), "--new-tokens", "12", "--draft-tokens", "3", "--limit", "2", "--temperature", "0"]
    result = CliRunner().invoke(app, ["bench", "acceptance", *arguments, "--tree-width", "3", "--tree-size", "9"])
    assert result.exit_code == 0, result.output
    assert "trees of 9 tokens, depth 3" in result.stdout
    figures = json.loads(result.stdout.splitlines()[-1])["drafters"][0]
    assert (figures["tree_width"], figures["tree_size"]) == (3, 9)
    assert figures["length"] > 1.5


def test_numbers_that_make_no_sense_are_told() -> None:
    for option, value in (("--draft-tokens", "5,0"), ("--temperature", "warm")):
        result = CliRunner().invoke(app, ["bench", "acceptance", str(drafter_path()), option, value])
        assert result.exit_code == 2
        assert "wanted" in result.output
