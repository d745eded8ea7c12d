"""Acceptance keeps the target's distribution, of one token and of several. Every outcome is counted (chi-square)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from counted_outcomes import (
    DRAFTERS,
    P_VALUE,
    ROWS,
    P,
    Rule,
    V,
    chi_square,
    draft_chain,
    draft_chain_of_few,
    draft_dynamic_tree,
    draft_longer_chain,
    draft_sampled_tree,
    draft_sampled_tree_of_few,
    first_tokens,
    random_table,
    rejection_acceptance,
    sampled_star,
    seeded,
    target_acceptance,
    tokens_added,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle31_hf.sampling import rejection
from eagle31_hf.sampling.acceptance import Acceptance, accept_greedy, accept_sampled_target
from eagle31_hf.sampling.draw import draw, draw_without_replacement
from eagle31_hf.sampling.rejection import accept_block, accept_rejection, accept_tree_rejection
from eagle31_hf.trees.draft_tree import DraftTree, Proposal
from eagle31_hf.trees.static import StaticTopology

# --- one position -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("accept", [accept_block, accept_tree_rejection, accept_sampled_target])
def test_one_draft_is_lossless(accept: Rule, drafter: str) -> None:
    assert chi_square(first_tokens(accept, sampled_star(DRAFTERS[drafter], 1, seed=7)), P) > P_VALUE


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("children", [2, 3, 5])
def test_sampled_children_are_lossless(drafter: str, children: int) -> None:
    tree = sampled_star(DRAFTERS[drafter], children, seed=8)
    assert chi_square(first_tokens(accept_rejection, tree), P) > P_VALUE


@pytest.mark.parametrize("accept", [accept_block, accept_tree_rejection])
def test_disjoint_support_is_never_accepted(accept: Rule) -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])
    tree = sampled_star(torch.tensor([0.0, 0.0, 0.0, 0.2, 0.5, 0.3]), 1, seed=9)
    accepted = accept(tree, p.expand(ROWS, 2, V), generator=seeded())
    assert (accepted.length == 1).all()
    assert chi_square(accepted.bonus, p) > P_VALUE


@pytest.mark.parametrize("children", [1, 3])
def test_reduced_draft_vocabulary_is_lossless(children: int) -> None:
    support = torch.tensor([5, 0, 3, 1])  # in no order, as nothing promises one
    q = torch.tensor([0.1, 0.3, 0.4, 0.2])
    tree = sampled_star(q, children, seed=10, support=support)
    assert chi_square(first_tokens(accept_rejection, tree), P) > P_VALUE


@pytest.mark.parametrize("paths", [[(0,)], [(0,), (1,), (0, 0), (1, 0), (1, 1)]])
def test_the_roots_draft_id_is_not_read(paths: list[tuple[int, ...]]) -> None:
    """The root is the target's token and need not be in the draft vocabulary."""
    topology = StaticTopology.from_paths(paths)
    draft_ids = torch.tensor([[10**9] + [path[-1] for path in topology.paths[1:]]])
    proposal = Proposal(torch.full((1, 3, 4), 0.25), draft_ids, torch.arange(4))
    tree = topology.tree(torch.cat([torch.tensor([[5]]), draft_ids[:, 1:]], dim=1), proposal)
    accepted = accept_rejection(tree, P.expand(1, tree.size, V), generator=seeded())
    assert 1 <= accepted.length <= topology.max_depth + 1


def test_deterministic_children_are_lossless() -> None:
    tokens = torch.tensor([[0, 1, 4, 0]]).expand(ROWS, -1)
    tree = StaticTopology.from_paths([(0,), (1,), (2,)]).tree(tokens)
    accepted = accept_sampled_target(tree, P.expand(ROWS, 4, V), generator=seeded())
    assert chi_square(tokens_added(accepted, tree)[:, 0], P) > P_VALUE
    expected = target_acceptance(P, torch.tensor([1, 4, 0]))
    assert (accepted.length > 1).double().mean() == pytest.approx(expected.item(), abs=0.015)


def test_rejection_with_target_equal_to_draft_accepts_all() -> None:
    accepted = accept_block(sampled_star(P, 1, seed=11), P.expand(ROWS, 2, V), generator=seeded())
    assert (accepted.length == 2).all()


@pytest.mark.parametrize("drafter", ["good", "uniform", "least_likely"])
def test_acceptance_is_one_minus_total_variation(drafter: str) -> None:
    q = DRAFTERS[drafter]
    expected = rejection_acceptance(P, q)
    assert expected == pytest.approx(1 - (P - q).abs().sum().item() / 2, abs=1e-6)
    accepted = accept_block(sampled_star(q, 1, seed=12), P.expand(ROWS, 2, V), generator=seeded())
    assert (accepted.length == 2).double().mean() == pytest.approx(expected.item(), abs=0.015)


def test_residual_of_nothing_falls_back_to_the_target() -> None:
    assert torch.equal(rejection._residual(P[None], P[None], None), P[None])


def accept_always(tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator) -> Acceptance:
    return accept_greedy(tree, tree.tokens.roll(-1, dims=1))


def accept_without_residual(tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator) -> Acceptance:
    right = accept_block(tree, target_probs, generator=generator)
    return Acceptance(right.path, right.length, draw(target_probs[:, 0], generator), right.best)


@pytest.mark.parametrize("wrong", [accept_always, accept_without_residual])
@pytest.mark.parametrize("drafter", ["good", "uniform", "least_likely"])
def test_a_wrong_rule_is_found_out(wrong: Rule, drafter: str) -> None:
    assert chi_square(first_tokens(wrong, sampled_star(DRAFTERS[drafter], 1, seed=13)), P) < 1e-6


def test_children_out_of_drawing_order_are_found_out() -> None:
    tree = sampled_star(DRAFTERS["good"], 3, seed=14)
    assert tree.proposal is not None
    by_token = tree.tokens[:, 1:].sort(1).values
    ids = torch.cat([tree.tokens[:, :1], by_token], dim=1)
    shuffled = StaticTopology.from_paths([(0,), (1,), (2,)]).tree(ids, Proposal(tree.proposal.probs, ids))
    assert chi_square(first_tokens(accept_rejection, shuffled), P) < 1e-6


# --- joint distribution of several tokens -----------------------------------------------------------------------------

Draft = Callable[[Tensor, Tensor, torch.Generator], DraftTree]


def generate(accept: Rule, draft: Draft, num_tokens: int) -> Tensor:
    """`(ROWS, num_tokens)`: whole rounds from token 0, each emitting at least one token."""
    p_table, q_table = random_table(1, size=V), random_table(2, size=V)
    generator = seeded(50_000)
    written = torch.zeros(ROWS, 1 + num_tokens + 4, dtype=torch.long)
    length = torch.ones(ROWS, 1, dtype=torch.long)
    for _ in range(num_tokens):
        last = written.gather(1, length - 1).squeeze(1)
        tree = draft(last, q_table, generator)
        accepted = accept(tree, p_table[tree.tokens], generator=generator)
        added = tokens_added(accepted, tree)
        slots = (length + torch.arange(added.shape[1])).clamp(max=written.shape[1] - 1)
        written.scatter_(1, slots, added)
        length = (length + accepted.length[:, None]).clamp(max=num_tokens + 1)  # later rounds write past the end
    return written[:, 1 : num_tokens + 1]


def joint_distribution(num_tokens: int) -> Tensor:
    p_table = random_table(1, size=V)
    joint = p_table[0]
    for _ in range(num_tokens - 1):
        joint = (joint.view(-1, V)[:, :, None] * p_table).flatten()
    return joint


@pytest.mark.parametrize("num_tokens", [2, 3])
@pytest.mark.parametrize(
    ("accept", "draft"),
    [
        (accept_rejection, draft_chain),
        (accept_rejection, draft_longer_chain),
        (accept_tree_rejection, draft_chain),
        (accept_rejection, draft_sampled_tree),
        (accept_rejection, draft_chain_of_few),
        (accept_rejection, draft_sampled_tree_of_few),
        (accept_sampled_target, draft_chain),
        (accept_sampled_target, draft_sampled_tree),
        (accept_sampled_target, draft_dynamic_tree),
    ],
)
def test_joint_distribution_is_the_targets(accept: Rule, draft: Draft, num_tokens: int) -> None:
    tokens = generate(accept, draft, num_tokens)
    weights = V ** torch.arange(num_tokens - 1, -1, -1)
    assert chi_square((tokens * weights).sum(1), joint_distribution(num_tokens)) > P_VALUE


def reached(ratios: Sequence[float]) -> list[float]:
    """`P_i` of `accept_block`, as written there."""
    chances = [1.0]
    for ratio in ratios:
        chances.append(min(1.0, chances[-1] * ratio))
    return chances[1:]


@settings(deadline=None)
@given(st.lists(st.floats(0, 8), min_size=1, max_size=7))
def test_chance_to_reach_a_node(ratios: list[float]) -> None:
    drafts, q = len(ratios), 0.1
    tokens = torch.zeros(1, drafts + 1, dtype=torch.long)
    target_probs = torch.tensor([[*ratios, 0.0]])[..., None] * q  # (1, K+1, 1): of token 0 only
    proposal = Proposal(torch.full((1, drafts, 1), q), tokens)
    chances = rejection._chance_to_reach(tokens, proposal, target_probs)[0]
    assert chances.tolist() == pytest.approx([1.0, *reached(ratios)], rel=1e-4, abs=1e-6)


def test_a_block_is_accepted_as_far_as_any_rule_may() -> None:
    """By every chain of four drafts: more than token by token, and what was accepted is that much."""
    p_table, q_table = random_table(1, size=V), random_table(2, size=V)
    best = one_by_one = 0.0
    for chain in itertools.product(range(V), repeat=4):
        steps = list(itertools.pairwise((0, *chain)))
        drawn = math.prod(float(q_table[step]) for step in steps)
        ratios = [float(p_table[step] / q_table[step]) for step in steps]
        best += drawn * sum(reached(ratios))
        one_by_one += drawn * sum(math.prod(min(1.0, r) for r in ratios[:k]) for k in range(1, 5))
    tree = draft_longer_chain(torch.zeros(ROWS, dtype=torch.long), q_table, seeded(20))
    accepted = accept_rejection(tree, p_table[tree.tokens], generator=seeded(21)).length - 1
    assert best > 1.05 * one_by_one
    assert accepted.double().mean() == pytest.approx(best, abs=0.03)


def test_pruning_sampled_children_by_probability_is_found_out() -> None:
    """Why a dynamic tree may not use rejection sampling: keeping the likelier of two draws is not a draw from q."""
    drawn = draw_without_replacement(P.expand(ROWS, V), 2, seeded())
    likelier = drawn.min(1).values  # P is sorted, so the smaller id is the likelier
    ids = torch.stack([torch.zeros_like(likelier), likelier], dim=1)
    tree = DraftTree.chain(ids, Proposal(P.expand(ROWS, 1, V), ids))
    assert chi_square(first_tokens(accept_rejection, tree), P) < 1e-6
