"""What is compiled and what is not, and what graphs accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.drafting import planner
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.graphs.draft_graphs import ChosenBy
from eagle31_hf.graphs.round_graphs import RoundGraph
from eagle31_hf.sampling.acceptance import Acceptance, accept_chosen
from eagle31_hf.sampling.draw import argmax, choose
from helpers import use_fixed_shapes_only


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Acceptance, Acceptance]]:
    """What graphs accept from now on, and what the eager rule accepts by the same noise."""
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)
    kept: list[tuple[Acceptance, Acceptance]] = []
    in_a_graph = RoundGraph.__call__

    def accept_twice(self: RoundGraph, tree: DraftTree, logits: Tensor, aux: Tensor, by: ChosenBy) -> Any:
        made, noise = in_a_graph(self, tree, logits, aux, by), by.noise
        if made is not None:
            scores = self.step.choosing.warping.of_nodes(logits)
            rows = torch.arange(len(logits))[:, None]
            choice = argmax(scores) if noise is None else choose(scores, noise[rows, tree.depths])
            kept.append((made.acceptance, accept_chosen(tree, choice)))
        return made

    monkeypatch.setattr(RoundGraph, "__call__", accept_twice)
    return kept
