"""Whatever becomes of a target's adapters, graphs that were made before write none of its texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pairs import kinds, leave_the_compiler_out, settle, write
from transformers import LlamaConfig

from adapter_changes import CHANGES, adapted
from eagle31_hf.cache import graph_sizes
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafting import planner
from eagle31_hf.generate.warm_up import warm_up
from eagle31_hf.graphs import captured
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.loop import kept_graphs
from helpers import GROUPED, random_drafter, random_target
from recorder import record_operations

OF_EQUAL_TEXTS = ("merge", "train")
HOW: dict[str, Any] = {"max_new_tokens": 24}


def make_pair() -> tuple[Any, Eagle31Drafter]:
    model = adapted(random_target(LlamaConfig(**GROUPED | {"num_hidden_layers": 2})))
    drafter = settle(random_drafter(model.get_base_model(), aux_layers=[0, 1, 2]))
    drafter.generation_config.num_assistant_tokens = 1  # to record an operation takes a second
    return model, drafter


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with graphs of the pair while its first adapter is at work."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kept_folder.CACHE_VARIABLE, str(folder))
        leave_the_compiler_out(patch)
        _, drafter = make_pair()
        assert len(warm_up(drafter, tokens=64, do_sample=False)) >= 2
    return folder


@pytest.fixture
def by_kept_graphs(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    leave_the_compiler_out(monkeypatch)
    shutil.copytree(kept, kept_folder.cache_folder())


@pytest.fixture
def by_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captured.CAPTURES, "cpu", record_operations)
    monkeypatch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 10)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 128)
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)


@pytest.mark.parametrize("way", ["by_kept_graphs", "by_recordings"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thorough(every=3)
def test_the_text_is_plains(change: str, way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    model, drafter = make_pair()
    before = write(drafter, target=model, **HOW)
    assert torch.equal(before, write(None, target=model, **HOW))
    assert "advance" in kinds(drafter), "graphs wrote it"
    CHANGES[change](model)
    model.train(change == "train")
    after = write(drafter, target=model, **HOW)
    assert torch.equal(after, write(None, target=model, **HOW))
    assert torch.equal(before, after) == (change in OF_EQUAL_TEXTS), "or a stale graph would not be noticed"
