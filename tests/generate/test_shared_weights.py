"""Kept graphs hold no weights: their pieces share the pair's, packed once, whatever these become."""

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
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with this pair's graphs."""
    with pytest.MonkeyPatch.context() as patch:
        return keep_graphs(tmp_path_factory.mktemp("kept") / "cache", patch)


@pytest.fixture
def warmed(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Eagle31Drafter:
    """The pair, and its graphs."""
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    leave_the_compiler_out(monkeypatch)
    shutil.copytree(kept, kept_folder.cache_folder())
    return make_pair()


def test_a_layer_is_kept_once(warmed: Eagle31Drafter) -> None:
    """What comes before the layers, one for all of them, what comes after; and no weights."""
    (verify,) = (path for path in kept_files(".json") if path.name.startswith("verify-1x8"))
    told = json.loads(verify.read_text())
    first, *layers, last = (piece for piece, _ in told["calls"])
    assert len(layers) == len(warmed.binding.layers)
    assert set(layers) == {1}
    assert (first, last, len(told["packages"])) == (0, 2, 3)
    assert [exported_in(verify.parent / name)[1] for name, _ in told["packages"]] == [{}] * 3


def test_graphs_share_packed_weights(warmed: Eagle31Drafter) -> None:
    write(warmed)
    graphs_of_pair = Pair.of(warmed).graphs
    packed = graphs_of_pair.packed
    after_one = packed.nbytes
    assert after_one > 0
    write(warmed, 1)
    assert packed is Pair.of(warmed).graphs.packed
    assert packed.nbytes == after_one


def test_packed_weights_go_where_memory_runs_out(warmed: Eagle31Drafter) -> None:
    """Though the text that is being written holds its graphs until it ends."""
    write(warmed)
    graphs_of_pair = Pair.of(warmed).graphs
    held_by_a_text = graphs_of_pair.made_by(graphs_of_pair.maker)
    packed = held_by_a_text.packed
    assert packed.nbytes > 0
    graphs_of_pair.drop("memory is wanted elsewhere")
    assert packed.nbytes == 0


def test_pieces_serve_weights_that_were_changed(warmed: Eagle31Drafter) -> None:
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
    warmed: Eagle31Drafter, break_: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    for path in kept_files(".json"):
        told = json.loads(path.read_text())
        break_(told)
        path.write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        assert_plain(warmed)
    assert not kinds(warmed)
    assert caplog.text.count("a kept graph cannot be used") == 1
