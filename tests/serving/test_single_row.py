"""A server of one row writes as `generate` does, by the graphs that are kept for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import chosen, read_in_pieces

from eagle31_hf.cache import graph_sizes
from eagle31_hf.graphs.fixed_cache import FixedShapeCache
from eagle31_hf.graphs.steps import GraphKey, GraphMaker, Step, tensors_in
from eagle31_hf.loop.pair import Pair
from eagle31_hf.serving.batch import Batch, Row
from eagle31_hf.serving.text import Request, Sampling, Writer
from helpers import demo_tokenizer, drafter_of, random_prompts, seeded, target_of

NEW_TOKENS = 30


@dataclass(frozen=True)
class NotesGraphs(GraphMaker):
    """Each step stands for its own graph; what graphs are asked for, and how their tensors lie, is noted."""

    met: dict[GraphKey, list[Any]] = field(default_factory=dict)

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        caches = [each for each in inputs if isinstance(each, FixedShapeCache)]
        layers = [layer for cache in caches for layer in cache.layers if layer.is_initialized]
        lent = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        self.met[key] = [(each.shape, lie_of(each)) for each in (*tensors_in(inputs), *lent)]
        return step


def lie_of(tensor: torch.Tensor) -> list[int]:
    """Strides, but for those that nothing is reached by."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    made = drafter_of("llama")
    yield made
    Pair.of(made).ahead = Pair.of(made).graphs = None


def noting(drafter: Any) -> NotesGraphs:
    notes = Pair.of(drafter).ahead = NotesGraphs()
    Pair.of(drafter).graphs = None
    return notes


def served(batch: Batch, target: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    request = Request(tuple(prompt), NEW_TOKENS, sampling, ignore_eos=True)
    text = Row(request, Writer(demo_tokenizer(), request, frozenset()), chosen(request, target))
    with torch.inference_mode():
        read_in_pieces(batch, text, writing=False)
        while batch.texts:
            batch.round()
    return text.writer.tokens


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8, seed=3)], ids=["greedy", "drawn"])
def test_it_asks_for_the_graphs_of_generate_and_writes_its_texts(drafter: Any, sampling: Sampling) -> None:
    """Prompts on both sides of a size of caches, a long text before a short one."""
    target, prompts = target_of("llama"), random_prompts(4, seed=3, longest=40)
    prompts.sort(key=len, reverse=True)
    kwargs: dict[str, Any] = {"do_sample": sampling.temperature != 0, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    if sampling.temperature:
        kwargs["temperature"] = sampling.temperature
    by_generate, wanted = noting(drafter), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with seeded(sampling.seed or 0):
            out = target.generate(ids, assistant_model=drafter, eos_token_id=None, **kwargs)
        assert drafter.stats.fallbacks == []
        wanted.append(out[0, len(prompt) :].tolist())
    by_server = noting(drafter)
    batch = Batch(drafter, max_rows=1, context=128, prefill_chunk=16)
    assert [served(batch, target, prompt, sampling) for prompt in prompts] == wanted
    assert batch.stats.fallbacks == []
    assert len(by_server.met) > 2
    kept = {key: by_generate.met.get(key) for key in by_server.met}
    assert by_server.met == kept, "as they are kept for generate"


def test_scores_that_are_no_numbers_end_the_text(drafter: Any) -> None:
    """Graphs of `generate` do not look."""
    target = target_of("llama")
    noting(drafter)
    batch = Batch(drafter, max_rows=1, context=128, prefill_chunk=16)
    request = Request((5, 6, 7), NEW_TOKENS, Sampling(0.0), ignore_eos=True)
    text = Row(request, Writer(demo_tokenizer(), request, frozenset()), chosen(request, target))
    with torch.inference_mode():
        read_in_pieces(batch, text, writing=False)
        hook = target.get_output_embeddings().register_forward_hook(lambda *call: call[2] * float("nan"))
        ((_, event),) = batch.round()
        hook.remove()
    assert (event.finish, text.writer.tokens) == ("error", [])
    assert "no numbers" in event.error
