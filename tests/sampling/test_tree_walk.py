"""Following the target's choice down a tree of drafts, against a naive walk."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.shape import num_candidates
from eagle31_hf.sampling.acceptance import Acceptance, accept_chosen, accept_tree_walk
from helpers import grown_tree


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens_added(accepted: Acceptance, tree: DraftTree) -> torch.Tensor:
    """`(B, D+1)` accepted drafts, then the bonus; the first `length` of a row are valid."""
    tokens = tree.tokens.gather(1, accepted.path).roll(-1, dims=1)  # the root was added a round ago
    return tokens.scatter(1, accepted.length[:, None] - 1, accepted.bonus[:, None])


def random_tree(generator: torch.Generator, rows: int, size: int, width: int, vocab: int) -> DraftTree:
    """Trees of random shape whose siblings differ, as drafted ones do."""
    logits = [torch.randn(rows, 1, vocab, generator=generator)]
    while num_candidates(len(logits), width) < size - 1:
        logits.append(torch.randn(rows, width, vocab, generator=generator))
    return grown_tree(logits, width, size)


def naive_walk(tree: DraftTree, choice: list[list[int]], row: int) -> tuple[list[int], int]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    path = [0]
    while True:
        wanted = choice[row][path[-1]]
        step = [i for i in range(1, tree.size) if parents[i] == path[-1] and tokens[i] == wanted]
        if not step:
            return path, wanted
        path.append(step[0])


@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_greedy_walk_matches_a_naive_walk(seed: int, size: int, width: int) -> None:
    generator = seeded(seed)
    tree = random_tree(generator, rows=4, size=size, width=width, vocab=4)
    choice = torch.randint(0, 4, (4, size), generator=generator)
    accepted = accept_chosen(tree, choice)
    walked = accept_tree_walk(
        tree, lambda rows, paths: [int(choice[b, p[-1]]) for b, p in zip(rows, paths, strict=True)], range(4)
    )
    for name in ("length", "bonus", "best"):
        assert torch.equal(getattr(walked, name), getattr(accepted, name)), name
    added = tokens_added(accepted, tree)
    for row in range(4):
        path, bonus = naive_walk(tree, choice.tolist(), row)
        count = int(accepted.length[row])
        assert accepted.path[row, :count].tolist() == walked.path[row, :count].tolist() == path
        assert (int(accepted.best[row]), int(accepted.bonus[row])) == (path[-1], bonus)
        assert added[row, :count].tolist() == [int(tree.tokens[row, node]) for node in path[1:]] + [bonus]


@given(st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_walks_end_where_a_tree_was_cut(seed: int, depth: int) -> None:
    """Before a text's end a compiled tree keeps the nodes that are too deep; a path must not reach them."""
    generator = seeded(seed)
    whole = random_tree(generator, rows=4, size=30, width=2, vocab=2)
    assert whole.max_depth > depth, "nothing to cut"
    tree = whole.cut_to(depth)
    choice = torch.randint(0, 2, (4, 30), generator=generator)
    accepted = accept_chosen(tree, choice)
    walked = accept_tree_walk(
        tree, lambda rows, paths: [int(choice[b, p[-1]]) for b, p in zip(rows, paths, strict=True)], range(4)
    )
    for name in ("path", "length", "bonus", "best"):
        assert torch.equal(getattr(walked, name), getattr(accepted, name)), name


def test_walking_asks_about_live_rows_alone() -> None:
    tree = random_tree(seeded(1), rows=3, size=9, width=2, vocab=4)
    asked: list[int] = []
    walked = accept_tree_walk(tree, lambda rows, paths: asked.extend(rows) or [9] * len(rows), [2])  # type: ignore[func-returns-value]
    assert asked == [2]
    assert walked.length.tolist() == [1, 1, 1]
    assert walked.bonus.tolist() == [0, 0, 9]
