"""Following the target's choice down a tree of drafts, on the host and in tensors, against a naive walk."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.shape import num_candidates
from eagle31_hf.sampling.acceptance import accept_chosen, accept_paths
from helpers import grown_tree


def random_tree(generator: torch.Generator, rows: int, size: int, width: int, vocab: int) -> DraftTree:
    """Trees of random shape whose siblings differ, as drafted ones do."""
    logits = [torch.randn(rows, 1, vocab, generator=generator)]
    while num_candidates(len(logits), width) < size - 1:
        logits.append(torch.randn(rows, width, vocab, generator=generator))
    return grown_tree(logits, width, size)


def naive_walk(tree: DraftTree, choice: list[list[int]], row: int, depth: int) -> tuple[list[int], int]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    path = [0]
    while True:
        wanted = choice[row][path[-1]]
        step = [i for i in range(1, tree.size) if parents[i] == path[-1] and tokens[i] == wanted]
        if not step or len(path) > depth:
            return path, wanted
        path.append(step[0])


@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_walks_match_a_naive_one(seed: int, size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, rows=4, size=size, width=width, vocab=4)
    choice = torch.randint(0, 4, (4, size), generator=generator)
    accepted = accept_chosen(tree, choice)
    walks = walks_of(tree, choice)
    for row in range(4):
        path, bonus = naive_walk(tree, choice.tolist(), row, size)
        assert accepted.path[row, : int(accepted.length[row])].tolist() == path
        assert int(accepted.bonus[row]) == bonus
        assert walks[row] == (path, bonus)


@given(st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_walks_end_where_a_tree_was_cut(seed: int, depth: int) -> None:
    """Before a text's end a compiled tree keeps the nodes that are too deep; a path must not reach them."""
    generator = torch.Generator().manual_seed(seed)
    whole = random_tree(generator, rows=4, size=30, width=2, vocab=2)
    assert whole.max_depth > depth, "nothing to cut"
    tree = whole.cut_to(depth)
    assert int(tree.depths.max()) == tree.max_depth == depth
    choice = torch.randint(0, 2, (4, 30), generator=generator)
    walks = walks_of(tree, choice)
    for row in range(4):
        assert walks[row] == naive_walk(tree, choice.tolist(), row, depth)


def walks_of(tree: DraftTree, choice: Tensor) -> dict[int, tuple[list[int], int]]:
    def choose(walking: dict[int, list[int]]) -> list[int]:
        assert len({len(path) for path in walking.values()}) == 1, "rows are asked about a level at a time"
        return [int(choice[row, path[-1]]) for row, path in walking.items()]

    return accept_paths(range(4), tree.tokens.tolist(), tree.parents.tolist(), choose, tree.max_depth + 1)


def test_nothing_is_asked_behind_the_token_that_ends_a_text() -> None:
    def choose(walking: dict[int, list[int]]) -> list[int]:
        return [(5, 6, 7)[path[-1]] for path in walking.values()]

    def ends(row: int, _nodes: int, token: int) -> bool:
        return row == 1 and token == 6

    walks = accept_paths([0, 1], [[9, 5, 6]] * 2, [[0, 0, 1]] * 2, choose, 3, ends)
    assert walks == {0: ([0, 1, 2], 7), 1: ([0, 1], 6)}
