"""Graphs of pairs too large to hold a copy of their weights each: pieces that are lent the weights write the same."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pairs import (
    SAMPLING,
    assert_plain,
    exported_in,
    keep_graphs,
    kept_files,
    kept_target,
    kinds,
    leave_the_compiler_out,
    make_pair,
    write,
)

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.loop.pair import Pair


@pytest.fixture(scope="module")
def kept_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with this pair's graphs as pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_folder, "FROZEN_BYTES", 0)
        return keep_graphs(tmp_path_factory.mktemp("kept") / "cache", patch)


@pytest.fixture
def lent(kept_pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Eagle31Drafter:
    """The pair as one too large for graphs that hold its weights, and its graphs as pieces."""
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kept_folder, "FROZEN_BYTES", 0)
    leave_the_compiler_out(monkeypatch)
    shutil.copytree(kept_pieces, kept_folder.cache_folder())
    return make_pair()


def test_pieces_write_the_same_texts(lent: Eagle31Drafter) -> None:
    for seed in range(3):
        assert_plain(lent, seed)
    assert kinds(lent) == {"absorb", "chain", "verify", "advance"}
    assert lent.stats.fallbacks == []
    for seed in range(3):
        assert_plain(lent, seed, **SAMPLING)


def test_a_layer_is_kept_once(lent: Eagle31Drafter) -> None:
    """What comes before the layers, one for all of them, what comes after; and no weights."""
    (verify,) = (path for path in kept_files(".json") if path.name.startswith("verify-1x8"))
    told = json.loads(verify.read_text())
    first, *layers, last = (piece for piece, _ in told["calls"])
    assert len(layers) == len(lent.binding.layers)
    assert set(layers) == {1}
    assert (first, last, len(told["packages"])) == (0, 2, 3)
    assert [exported_in(verify.parent / name)[1] for name, _ in told["packages"]] == [{}] * 3


def test_graphs_share_packed_weights(lent: Eagle31Drafter) -> None:
    write(lent)
    graphs_of_pair = Pair.of(lent).graphs
    packed = graphs_of_pair.ahead.cutter.weights
    after_one = packed.nbytes
    assert after_one > 0
    write(lent, 1)
    assert packed is Pair.of(lent).graphs.ahead.cutter.weights
    assert packed.nbytes == after_one


def test_packed_weights_go_where_memory_runs_out(lent: Eagle31Drafter) -> None:
    """Though the text that is being written holds its graphs until it ends."""
    write(lent)
    graphs_of_pair = Pair.of(lent).graphs
    held_by_a_text = graphs_of_pair.made_by(graphs_of_pair.maker)
    packed = held_by_a_text.ahead.cutter.weights
    assert packed.nbytes > 0
    graphs_of_pair.drop("memory is wanted elsewhere")
    assert packed.nbytes == 0


def test_pieces_serve_weights_that_were_changed(lent: Eagle31Drafter) -> None:
    """A target that was trained further keeps its graphs, also while they are in use."""
    target = copy.deepcopy(kept_target())
    drafter = make_pair(target)
    for weight in (target.model.layers[1].mlp.up_proj.weight, target.lm_head.weight):
        with torch.no_grad():
            weight.mul_(-1.5)
        assert_plain(drafter, target=target)
        assert "advance" in kinds(drafter)


def name_another_weight(told: dict[str, Any]) -> None:
    """A file that another version has written, say."""
    for _, sources in told["calls"]:
        for source in sources:
            if source[0] in ("weight", "packed"):
                source[1] = "models.7.weight" if source[0] == "weight" else ["models.7.weight"]


def read_a_later_result(told: dict[str, Any]) -> None:
    told["calls"][0][1][0] = ["result", 99, 0]


@pytest.mark.parametrize("break_", [name_another_weight, read_a_later_result])
def test_pieces_put_together_wrong_are_done_without(
    lent: Eagle31Drafter, break_: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    for path in kept_files(".json"):
        told = json.loads(path.read_text())
        break_(told)
        path.write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        assert_plain(lent)
    assert not kinds(lent)
    assert caplog.text.count("a kept graph cannot be used") == 1
