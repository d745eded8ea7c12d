"""Trees as data: what is kept, how it is numbered, who is above whom, against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.drafter.dynamic import grow_tree
from eagle31_hf.drafter.session import DraftState
from eagle31_hf.drafting.draft_tree import DraftTree, ancestors_from_parents, chain_ancestors
from eagle31_hf.drafting.shape import DraftShape
from helpers import grown_tree

VOCAB = 7
seeds = st.integers(0, 2**31)


def logits_of(seed: int, *, rows: int = 2, top_k: int = 3, depth: int = 3, certain: bool = False) -> list[Tensor]:
    """Of the root and of each further level's nodes; `certain` of one token each, so that it scores what its parent
    does."""
    generator = torch.Generator().manual_seed(seed)
    nodes = [1] + [top_k] * (depth - 1)
    return [torch.randn(rows, n, VOCAB, generator=generator) * (1e4 if certain else 1) for n in nodes]


def random_tree(seed: int, *, top_k: int = 3, size: int = 8, **how: Any) -> DraftTree:
    return grown_tree(logits_of(seed, top_k=top_k, **how), top_k, size)


trees = st.builds(
    random_tree, seeds, rows=st.integers(1, 3), top_k=st.integers(1, 4), depth=st.integers(1, 4),
    size=st.integers(2, 25), certain=st.booleans(),
)  # fmt: skip


def above(parents: list[int], node: int) -> list[int]:
    """Node and its ancestors, root last."""
    chain = [node]
    while chain[-1] != 0:
        chain.append(parents[chain[-1]])
    return chain


def assert_consistent(tree: DraftTree) -> None:
    assert (tree.tokens.dtype, tree.parents.dtype, tree.ancestors.dtype) == (torch.int64, torch.int64, torch.bool)
    for row in range(tree.tokens.shape[0]):
        parents = tree.parents[row].tolist()
        assert parents[0] == 0
        assert all(parent < node for node, parent in enumerate(parents) if node)
        for node in range(tree.size):
            path = above(parents, node)
            assert tree.depths[row, node] == len(path) - 1 <= tree.max_depth
            assert sorted(path) == tree.ancestors[row, node].nonzero().flatten().tolist()
            assert not tree.is_chain or sum(parent == node for parent in parents[1:]) <= 1


@given(trees)
@settings(max_examples=60, deadline=None)
def test_grown_trees_are_consistent(tree: DraftTree) -> None:
    assert_consistent(tree)


@given(st.data(), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_ancestors_from_any_parents(data: st.DataObject, size: int) -> None:
    parents = [0] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    depth = max(len(above(parents, node)) for node in range(size)) - 1
    reach = ancestors_from_parents(torch.tensor([parents]), depth)[0]
    for node in range(size):
        assert reach[node].nonzero().flatten().tolist() == sorted(above(parents, node))


def test_ancestors_of_a_long_chain_do_not_overflow() -> None:
    parents = (torch.arange(400) - 1).clamp(min=0)[None]
    assert torch.equal(ancestors_from_parents(parents, 399)[0], chain_ancestors(400))


@pytest.mark.parametrize("size", [1, 2, 6])
def test_chain(size: int) -> None:
    tokens = torch.arange(2 * size).view(2, size)
    tree = DraftTree.chain(tokens)
    assert_consistent(tree)
    assert tree.is_chain
    assert tree.max_depth == size - 1
    assert tree.tokens is tokens
    assert tree.parents[1].tolist() == [0, *range(size - 1)]
    assert torch.equal(tree.ancestors[0], torch.ones(size, size).tril().bool())


def test_chain_shape_made_under_inference_mode_can_be_trained_through() -> None:
    with torch.inference_mode():
        mask = DraftTree.chain(torch.zeros(1, 13, dtype=torch.long)).ancestors
    weight = torch.ones(1, 13, 13, requires_grad=True)
    (weight * mask).sum().backward()
    assert weight.grad is not None


def reference_tree(level_logprobs: list[Tensor], top_k: int, size: int) -> tuple[list[int], list[int]]:
    """EAGLE-2/3 `topK_genrate` in plain Python for one row: tokens and parents of the kept nodes.

    `level_logprobs[0]` is `(V,)`, the others `(top_k, V)` by frontier row. Flat numbering and the parent formula are
    the reference's.
    """

    def best(values: list[float], k: int) -> list[int]:
        return sorted(range(len(values)), key=lambda i: -values[i])[:k]

    first = level_logprobs[0].tolist()
    chosen = best(first, top_k)
    tokens, scores, parents = list(chosen), [first[i] for i in chosen], [0] * top_k
    frontier_scores, frontier_index = list(scores), list(range(top_k))
    for i, logprobs in enumerate(level_logprobs[1:]):
        bias = 1 + top_k**2 * max(0, i - 1) + (top_k if i > 0 else 0)
        block_tokens, block_scores = [], []
        for row in range(top_k):
            values = logprobs[row].tolist()
            for token in best(values, top_k):
                block_tokens.append(token)
                block_scores.append(values[token] + frontier_scores[row])
                parents.append(frontier_index[row] + bias)
        tokens, scores = tokens + block_tokens, scores + block_scores
        frontier_index = best(block_scores, top_k)
        frontier_scores = [block_scores[j] for j in frontier_index]
    kept = sorted(best(scores, size - 1))
    number = {0: 0} | {candidate + 1: place + 1 for place, candidate in enumerate(kept)}
    return [tokens[c] for c in kept], [number[parents[c]] for c in kept]


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_a_tree_equals_the_reference_algorithms(seed: int, top_k: int, depth: int, size: int) -> None:
    logits = logits_of(seed, rows=1, top_k=top_k, depth=depth)
    tree = grown_tree(logits, top_k, size, 100 + torch.arange(VOCAB))
    first, *others = (each[0].log_softmax(-1) for each in logits)
    tokens, parents = reference_tree([first[0], *others], top_k, tree.size)
    assert tree.tokens[0].tolist() == [99] + [100 + token for token in tokens]
    assert tree.parents[0].tolist() == [0, *parents]
    assert tree.size == DraftShape(depth, top_k=top_k, size=size).nodes
    assert tree.is_chain == (top_k == 1 or tree.size == 2)


@pytest.mark.parametrize("size", range(2, 6))
def test_of_equal_scores_the_parents_is_kept_first(size: int) -> None:
    tree = random_tree(0, top_k=3, depth=4, size=size, certain=True)
    assert tree.parents.tolist() == [[0, *range(size - 1)]] * 2


def test_a_step_reads_what_its_parent_fed_back_and_sees_its_ancestors_alone() -> None:
    rows, top_k, above = 2, 3, {}  # by row and number of a step's node, the numbers of those it is below

    def step(tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor) -> DraftState:
        for row in range(rows):
            for i in range(top_k):
                parent = int(feedback[row, i])
                above[row, after + i] = [after + i, *(above[row, parent] if depth else [])]
                assert ancestors[row, i].nonzero().flatten().tolist() == sorted(above[row, after + i])
                chosen = scores[-1][row, parent - after + top_k if depth else 0].topk(top_k).indices
                assert tokens[row, i] in chosen
        scores.append(torch.randn(rows, top_k, VOCAB, generator=generator))
        numbers = (after + torch.arange(top_k)).float().expand(rows, -1)
        return DraftState(scores[-1], numbers[..., None])

    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(rows, 1, VOCAB, generator=generator)]
    root = DraftState(scores[0], torch.zeros(rows, 1, 1))
    grow_tree(root, step, None, torch.zeros(rows, dtype=torch.long), DraftShape(4, top_k=top_k, size=9))
    assert len(scores) == 4
