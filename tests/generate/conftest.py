"""A pair whose graphs are kept or captured, without a compiler and without a card."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kept_pairs import failing, keep_graphs, leave_the_compiler_out, make_pair

from eagle31_hf.cache import graph_sizes
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafting import planner
from eagle31_hf.graphs import captured
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.graphs.ahead import packages
from eagle31_hf.loop import kept_graphs
from recorder import Recorder


@pytest.fixture
def pair() -> Eagle31Drafter:
    return make_pair()


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with this pair's graphs for greedy and drawn texts."""
    with pytest.MonkeyPatch.context() as patch:
        return keep_graphs(tmp_path_factory.mktemp("kept") / "cache", patch)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are the exported steps, in a folder that holds none yet."""
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    leave_the_compiler_out(monkeypatch)


@pytest.fixture
def warmed(kept: Path, no_compiler: None, pair: Eagle31Drafter) -> Eagle31Drafter:
    """The pair, its graphs kept, in a process that knows nothing of them yet."""
    shutil.copytree(kept, kept_folder.cache_folder())
    return pair


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Steps are captured, early in a text and for short rows; drafts in vain are not given up."""
    made = Recorder()
    monkeypatch.setitem(captured.CAPTURES, "cpu", made)
    monkeypatch.setattr(packages.GraphPackages, "compile", failing(AssertionError("captured is quicker")))
    monkeypatch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 10)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 128)
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)
    return made
