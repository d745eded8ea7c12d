"""A server of one row writes as `generate` does, by the graphs that are kept for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import batch_of, plain, read_in_pieces, text_of, write_all

from eagle31_hf.cache import graph_sizes
from eagle31_hf.graphs.fixed_cache import FixedShapeCache
from eagle31_hf.graphs.steps import GraphKey, GraphMaker, Step, tensors_in
from eagle31_hf.loop import kept_graphs
from eagle31_hf.loop.pair import Pair
from eagle31_hf.serving.text import Sampling
from helpers import drafter_of, random_prompts, target_of

NEW_TOKENS = 30


@dataclass(frozen=True)
class NotesGraphs(GraphMaker):
    """Each step stands for its own graph; what graphs are asked for, and how their tensors lie, is noted."""

    met: dict[GraphKey, list[Any]] = field(default_factory=dict)

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple, outputs: Any) -> Step:
        caches = [each for each in inputs if isinstance(each, FixedShapeCache)]
        layers = [layer for cache in caches for layer in cache.layers if layer.is_initialized]
        lent = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        self.met[key] = [(each.shape, lie_of(each)) for each in (*tensors_in(inputs), *lent)]
        return step


def lie_of(tensor: torch.Tensor) -> list[int]:
    """Strides, but for those that nothing is reached by."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], NotesGraphs]]:
    """Has all graphs noted, from now on, that are looked for in the folder."""
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    pair = Pair.of(drafter_of("llama"))

    def note() -> NotesGraphs:
        notes, pair.graphs = NotesGraphs(), None
        monkeypatch.setattr(kept_graphs, "_kept_graphs", lambda *_, **__: pair.current_graphs().made_by(notes))
        return notes

    yield note
    pair.graphs = None


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8, seed=3)], ids=["greedy", "drawn"])
def test_it_asks_for_the_graphs_of_generate_and_writes_its_texts(noting: Any, sampling: Sampling) -> None:
    """Prompts on both sides of a size of caches, a long text before a short one."""
    drafter, target, prompts = drafter_of("llama"), target_of("llama"), random_prompts(4, seed=3, longest=40)
    prompts.sort(key=len, reverse=True)
    by_generate, wanted = noting(), []
    for prompt in prompts:
        wanted.append(plain(target, prompt, NEW_TOKENS, sampling, assistant_model=drafter))
        assert drafter.stats.fallbacks == []
    by_server = noting()
    batch = batch_of(drafter, 1, context=128, chunk=16)
    assert write_all(batch, [text_of(prompt, NEW_TOKENS, sampling) for prompt in prompts]) == wanted
    assert batch.stats.fallbacks == []
    assert len(by_server.met) > 2
    kept = {key: by_generate.met.get(key) for key in by_server.met}
    assert by_server.met == kept, "as they are kept for generate"


def test_scores_that_are_no_numbers_end_the_text(noting: Any) -> None:
    """Graphs of `generate` do not look."""
    target = target_of("llama")
    notes, batch = noting(), batch_of(drafter_of("llama"), 1, context=128, chunk=16)
    text = text_of((5, 6, 7), NEW_TOKENS)
    with torch.inference_mode():
        read_in_pieces(batch, text, writing=False)
        hook = target.get_output_embeddings().register_forward_hook(lambda *call: call[2] * float("nan"))
        ((_, event),) = batch.round()
        hook.remove()
    assert (event.finish, len(text.writer.tokens)) == ("error", 1)
    assert "no numbers" in event.error
    assert notes.met
