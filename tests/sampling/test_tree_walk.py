"""Following the target's choice down a tree of drafts, against a naive walk; masks of the tokens that were seen on the
way, against transformers' repetition penalty on the text itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.shape import num_candidates
from eagle31_hf.sampling.acceptance import accept_chosen, accept_paths
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from eagle31_hf.sampling.seen_tokens import SeenTokens, seen_after, seen_at_nodes
from helpers import grown_tree

VOCABULARY = 40


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


@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_walks_match_a_naive_one(seed: int, size: int, width: int, depth: int) -> None:
    """In a tree that is cut, too: before a text's end nodes that are too deep stay, and no path must reach them."""
    generator = torch.Generator().manual_seed(seed)
    vocab = max(width, 2)
    whole = random_tree(generator, rows=4, size=size, width=width, vocab=vocab)
    tree, choice = whole.cut_to(depth), torch.randint(vocab, (4, size), generator=generator)
    assert int(tree.depths.max()) <= tree.max_depth == min(depth, whole.max_depth)
    accepted, walks = accept_chosen(tree, choice), walks_of(tree, choice)
    for row in range(4):
        path, bonus = naive_walk(tree, choice.tolist(), row, tree.max_depth)
        assert walks[row] == (path, bonus)
        if tree is whole:
            assert accepted.path[row, : int(accepted.length[row])].tolist() == path
            assert int(accepted.bonus[row]) == bonus


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


# --- tokens that were seen --------------------------------------------------------------------------------------------


def processing(*processors: object) -> ScoreProcessing:
    return ScoreProcessing(LogitsProcessorList(processors))


@pytest.mark.parametrize("penalty", [0.7, 1.05, 1.3])
def test_all_nodes_at_once_are_the_nodes_one_by_one(penalty: float) -> None:
    torch.manual_seed(0)
    prompts, drafts = torch.randint(VOCABULARY, (2, 7)), torch.randint(VOCABULARY, (2, 4))
    parents = [0, 0, 1, 1]  # root, its child, and two children of that
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    ancestors = torch.zeros(2, 4, 4, dtype=torch.bool)
    for node, path in enumerate(paths):
        assert node == 0 or parents[node] in path
        ancestors[:, node, path] = True
    prompts[:, -1] = drafts[:, 0]
    logits = torch.randn(2, 4, VOCABULARY)
    logits[0, 1, 3:9] = -torch.inf
    made = processing(RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(0.6), TopKLogitsWarper(9))
    expected = torch.stack(
        [
            made.row_scores(lambda n, b=b: torch.cat((prompts[b], drafts[b, paths[n]]))[None], logits[b], [b] * 4)
            for b in range(2)
        ]
    )
    seen = seen_at_nodes(SeenTokens(prompts, VOCABULARY, [0, 0]).of([0, 1], [[], []]), drafts, ancestors)
    assert torch.equal(made.draft_warping.of_nodes(logits, seen), expected)


def test_masks_follow_texts_that_grow_apart_and_are_taken_back() -> None:
    prompts = torch.tensor([[1, 2], [3, 3]])
    seen = SeenTokens(prompts, 10, [0, 0])
    assert tokens(seen.of([0, 1], [[], []])) == [{1, 2}, {3}]
    assert tokens(seen.of([0, 1], [[5, 6], [7]])) == [{1, 2, 5, 6}, {3, 7}]
    assert tokens(seen.of([1], [[5, 6], [7, 8]])) == [{3, 7, 8}]
    assert tokens(seen.of([0, 1], [[5], [7]])) == [{1, 2, 5}, {3, 7}]
    assert tokens(seen.of([0, 1], [[5, 4], [7, 9]])) == [{1, 2, 4, 5}, {3, 7, 9}]


def tokens(masks: torch.Tensor) -> list[set[int]]:
    return [set(mask.nonzero().flatten().tolist()) for mask in masks]


def test_behind_what_was_accepted() -> None:
    seen = torch.zeros(2, 8, dtype=torch.bool)
    after = seen_after(seen, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 0]), torch.tensor([7, 0]))
    assert tokens(after) == [{1, 2, 7}, {0}]


@pytest.mark.parametrize("ignored", [0, 3, 6, 8])
def test_tokens_that_a_penalty_leaves_out(ignored: int) -> None:
    """Eight may be left out of six of a prompt and three behind it."""
    torch.manual_seed(2)
    text, logits = torch.randint(VOCABULARY, (1, 9)), torch.randn(1, VOCABULARY)
    made = processing(RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=ignored))
    seen = SeenTokens(text[:, :6], VOCABULARY, made.uncounted_tokens(1)).of([0], [text[0, 6:].tolist()])
    assert torch.equal(made.draft_warping(logits, seen), made.row_scores(lambda _: text, logits, [0]))


def test_what_cannot_be_written_is_not_seen() -> None:
    seen = SeenTokens(torch.tensor([[2, 12]]), 10, [0]).of([0], [[3]])
    assert tokens(seen) == [{2, 3}]
    assert seen.shape == (1, 10)


def test_top_k_before_a_penalty_looks_at_all_scores() -> None:
    torch.manual_seed(1)
    logits, prompt = torch.randn(1, VOCABULARY), torch.randint(VOCABULARY, (1, 9))
    made = processing(TopKLogitsWarper(5), RepetitionPenaltyLogitsProcessor(1.5))
    seen = SeenTokens(prompt, VOCABULARY, [0]).of([0], [[]])
    scores, candidates = made.draft_warping.candidates(logits, seen=seen)
    assert candidates is None
    assert torch.equal(scores, made.row_scores(lambda _: prompt, logits, [0]))
