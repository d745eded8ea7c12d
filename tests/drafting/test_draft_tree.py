"""Trees as data: what is kept, how it is numbered, who is above whom, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.drafter.dynamic import TreeGrowth
from eagle31_hf.drafting.draft_tree import DraftTree, ancestors_from_parents, chain_ancestors
from eagle31_hf.errors import ConfigurationError

VOCAB = 7
seeds = st.integers(0, 2**31)


def grow(seed: int, *, rows: int = 2, top_k: int = 3, expansions: int = 2, tied: bool = False) -> TreeGrowth:
    """Random candidates; `tied` draws log-probabilities from {0, -1}, so a child often scores what its parent does."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs(*shape: int) -> Tensor:
        if tied:
            return -torch.randint(0, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator).log_softmax(-1)

    growth = TreeGrowth.start(logprobs(rows, VOCAB), top_k)
    for _ in range(expansions):
        growth = growth.expand(growth.frontier(), logprobs(rows, top_k, VOCAB))
    return growth


growths = st.builds(
    grow, seeds, rows=st.integers(1, 3), top_k=st.integers(1, 4), expansions=st.integers(0, 3), tied=st.booleans()
)


def pruned(growth: TreeGrowth, size: int) -> DraftTree:
    rows = growth.frontier().draft_ids.shape[0]
    return growth.prune(torch.full((rows,), 99), min(size, growth.num_candidates + 1))


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
            assert sum(parent == node for parent in parents[1:]) <= tree.max_children


# --- any tree ---------------------------------------------------------------------------------------------------------


@given(growths, st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_pruned_trees_are_consistent(growth: TreeGrowth, size: int) -> None:
    assert_consistent(pruned(growth, size))


@given(growths, st.integers(1, 25), seeds)
@settings(max_examples=60, deadline=None)
def test_path_to_any_node(growth: TreeGrowth, size: int, seed: int) -> None:
    tree = pruned(growth, size)
    nodes = torch.randint(0, tree.size, tree.tokens.shape[:1], generator=torch.Generator().manual_seed(seed))
    path, count = tree.path_to(nodes)
    assert path.shape == (len(nodes), tree.max_depth + 1)
    for row, node in enumerate(nodes.tolist()):
        expected = above(tree.parents[row].tolist(), node)[::-1]
        assert path[row].tolist() == expected + [0] * (tree.max_depth + 1 - len(expected))
        assert count[row] == len(expected)


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


# --- chains -----------------------------------------------------------------------------------------------------------


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


# --- dynamic trees ----------------------------------------------------------------------------------------------------


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


@given(seeds, st.integers(1, 4), st.integers(0, 3), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_dynamic_tree_equals_the_reference_algorithm(seed: int, top_k: int, expansions: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = [torch.randn(VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)]
    for _ in range(expansions):
        logprobs.append(torch.randn(top_k, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1))
    growth = TreeGrowth.start(logprobs[0][None], top_k)
    for level in logprobs[1:]:
        growth = growth.expand(growth.frontier(), level[None])
    size = min(size, growth.num_candidates + 1)

    draft_to_target = 100 + torch.arange(VOCAB)
    tree = growth.prune(torch.tensor([55]), size, draft_to_target)
    tokens, parents = reference_tree(logprobs, top_k, size)
    assert tree.tokens[0].tolist() == [55] + [100 + token for token in tokens]
    assert tree.parents[0].tolist() == [0, *parents]


def parents_of_all(growth: TreeGrowth) -> Tensor:
    return growth.parents_of(torch.arange(growth.num_candidates).expand(len(growth.draft_ids[0]), -1))


@given(st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_equal_scores_keep_every_ancestor(top_k: int, expansions: int) -> None:
    """All candidates tie: any choice is a best one, but only keeping low numbers first keeps parents."""
    growth = TreeGrowth.start(torch.zeros(2, VOCAB), top_k)
    for _ in range(expansions):
        growth = growth.expand(growth.frontier(), torch.zeros(2, top_k, VOCAB))
    parent_of = [0, *(parents_of_all(growth)[0] + 1).tolist()]  # the root is node 0
    for size in range(1, growth.num_candidates + 2):
        tree = growth.prune(torch.zeros(2, dtype=torch.long), size)
        assert tree.parents[0].tolist() == parent_of[:size]
        assert_consistent(tree)


def test_frontier_rows_lead_back_to_their_parents() -> None:
    top_k, expansions = 3, 3
    growth = TreeGrowth.start(torch.randn(2, VOCAB).log_softmax(-1), top_k)
    history = [growth.frontier()]
    for _ in range(expansions):
        growth = growth.expand(growth.frontier(), torch.randn(2, top_k, VOCAB).log_softmax(-1))
        history.append(growth.frontier())
    nodes = [frontier.numbers + 1 for frontier in history]  # the root is node 0
    parents = torch.nn.functional.pad(parents_of_all(growth) + 1, (1, 0))
    ids = torch.nn.functional.pad(torch.cat(growth.draft_ids, dim=1), (1, 0))
    for before, here, frontier in zip(nodes, nodes[1:], history[1:], strict=False):
        assert torch.equal(parents.gather(1, here), before.gather(1, frontier.parent_rows))
        assert torch.equal(ids.gather(1, here), frontier.draft_ids)
    forwarded = torch.cat(nodes, dim=1)
    for row in range(2):
        for i, node in enumerate(nodes[-1][row].tolist()):
            seen = forwarded[row][history[-1].ancestors[row, i]].tolist()
            assert sorted(seen) == sorted(above(parents[row].tolist(), node)[:-1])


@pytest.mark.parametrize("size", [0, 14])
def test_prune_refuses_a_size_it_cannot_fill(size: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"size is {size}, .* 12 candidates; wanted 1\.\.13"):
        grow(0, top_k=3, expansions=1).prune(torch.zeros(2, dtype=torch.long), size)


def test_width_one_grows_a_chain() -> None:
    tree = pruned(grow(1, top_k=1, expansions=3), 5)
    assert tree.is_chain
    assert tree.parents[0].tolist() == [0, 0, 1, 2, 3]
