"""Acceptance keeps the target's distribution. Vocabularies are small enough to count every outcome (chi-square)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.sampling import acceptance, rejection
from eagle31_hf.sampling import draw as drawing
from eagle31_hf.sampling.acceptance import (
    Acceptance,
    AcceptanceRule,
    accept_greedy,
    accept_sampled_target,
    choose_rule,
)
from eagle31_hf.sampling.draw import draw, draw_numbers, draw_without_replacement
from eagle31_hf.sampling.rejection import accept_block, accept_rejection, accept_tree_rejection
from eagle31_hf.sampling.tree_walk import accept_tree_walk
from eagle31_hf.trees.draft_tree import DraftTree, Proposal, to_target_ids
from eagle31_hf.trees.dynamic import TreeGrowth
from eagle31_hf.trees.static import StaticTopology


def target_acceptance(p: Tensor, children: Tensor) -> Tensor:
    """Chance that `accept_sampled_target` takes one of `children (..., k)`, given `p (..., V)`: `(...)`."""
    return p.gather(-1, children).sum(-1)


def rejection_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a single draft drawn from `q (..., V)` is accepted: `sum min(p, q) = 1 - TV(p, q)`, `(...)`."""
    return torch.minimum(p, q).sum(-1)


V = 6
ROWS = 20_000
P_VALUE = 0.01

P = torch.tensor([0.42, 0.25, 0.16, 0.1, 0.05, 0.02])
DRAFTERS = {
    "equal": P,
    "good": torch.tensor([0.5, 0.2, 0.1, 0.1, 0.06, 0.04]),
    "uniform": torch.full((V,), 1 / V),
    "least_likely": torch.tensor([0.004, 0.006, 0.01, 0.03, 0.25, 0.7]),
    "one_hot": torch.eye(V)[3],
    "half_support": torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0, 0.0]),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(outcomes: Tensor, expected: Tensor) -> float:
    """p-value of `outcomes (R,)` against probabilities; an impossible outcome gives 0."""
    counts = torch.bincount(outcomes, minlength=expected.numel()).double()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    wanted = expected.double() / expected.double().sum() * outcomes.numel()
    rare = possible & (wanted < 5)  # the statistic is chi-square distributed only for cells of some size: merge them
    common = possible & ~rare
    cells = [(counts[common], wanted[common]), (counts[rare].sum()[None], wanted[rare].sum()[None])]
    got, want = (torch.cat(column) for column in zip(*cells[: 1 + bool(rare.any())], strict=True))
    return float(stats.chisquare(got.numpy(), want.numpy()).pvalue)


def random_table(seed: int, sharpness: float = 1.5, size: int = V) -> Tensor:
    """`(size, V)` next-token probabilities."""
    return torch.softmax(sharpness * torch.randn(size, V, generator=seeded(seed)), dim=-1)


def tokens_added(accepted: Acceptance, tree: DraftTree) -> Tensor:
    """`(B, D+1)` accepted drafts, then the bonus; the first `count` of a row are valid."""
    tokens = tree.tokens.gather(1, accepted.path).roll(-1, dims=1)  # the root was added a round ago
    return tokens.scatter(1, accepted.length[:, None] - 1, accepted.bonus[:, None])


# --- drawing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "by blocks"])
def way_to_draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are summed up in one go, or blocks of two of them first."""
    if request.param == "by blocks":
        monkeypatch.setattr(drawing, "DRAWN_BY_BLOCKS", 0)
        monkeypatch.setattr(drawing, "BLOCK", 2)


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize("width", [None, V])
def test_draw_follows_weights_and_skips_zeros(width: int | None) -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 0.0])
    (numbers,) = draw_numbers((ROWS, 1), width, weights.device, seeded()).unbind(1)
    for outcomes in (draw(weights.expand(ROWS, V), numbers=numbers), draw(weights.expand(ROWS, V), seeded())):
        assert chi_square(outcomes, weights / 6) > P_VALUE
        assert set(outcomes.tolist()) == {1, 2, 4}


@pytest.mark.usefixtures("way_to_draw")
def test_draw_keeps_the_share_of_rare_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # A float32 running sum near 1 moves in steps of 6e-8 and would lose this token's 1e-9 altogether.
    weights = torch.tensor([[1.0, 1e-9, 0.0]])
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), 1.0 - 0.9e-9, dtype=torch.float64))
    assert draw(weights).item() == 1
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), 1.0 - 1.1e-9, dtype=torch.float64))
    assert draw(weights).item() == 0


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize(("uniform", "index"), [(0.0, 1), (1.0 - 2.0**-53, 2)])
def test_draw_at_either_end_skips_zeros(monkeypatch: pytest.MonkeyPatch, uniform: float, index: int) -> None:
    monkeypatch.setattr(drawing, "uniform_numbers", lambda *_: torch.full((1, 1), uniform, dtype=torch.float64))
    assert draw(torch.tensor([[0.0, 0.3, 0.4, 0.0]])).item() == index


@pytest.mark.parametrize("invert", [drawing._invert, drawing._invert_by_blocks])
@given(weights=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=200).filter(any), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_draw_never_returns_an_index_of_weight_zero(
    invert: Callable[[Tensor, Tensor], Tensor], weights: list[float], seed: int
) -> None:
    row = torch.tensor(weights)
    numbers = drawing.uniform_numbers((50, 1), row.device, seeded(seed))
    numbers[0], numbers[1] = 0.0, 1.0 - 2.0**-53
    drawn = invert(row.expand(50, -1), numbers)
    assert (row[drawn] > 0).all()


@pytest.mark.parametrize("width", [64, 8192, 10_001])
def test_blocks_draw_what_the_running_sum_draws(width: int) -> None:
    weights = torch.softmax(4 * torch.randn(3, 40, width, generator=seeded(1)), -1)
    numbers = drawing.uniform_numbers((3, 40, 1), weights.device, seeded(2))
    assert torch.equal(drawing._invert_by_blocks(weights, numbers), drawing._invert(weights, numbers))


@pytest.mark.usefixtures("way_to_draw")
@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_a_row_nothing_can_be_drawn_from_yields_no_token(weight: float) -> None:
    drawn = draw(torch.tensor([[weight] * 5, [1.0] * 5]), seeded())
    assert drawn[0] == 5
    assert drawn[1] < 5


def test_draw_without_replacement_is_sequential_drawing() -> None:
    pairs = draw_without_replacement(P.expand(ROWS, V), 2, seeded())
    expected = torch.zeros(V, V)
    for i in range(V):
        for j in range(V):
            expected[i, j] = P[i] * P[j] / (1 - P[i]) if i != j else 0
    assert chi_square(pairs[:, 0] * V + pairs[:, 1], expected.flatten()) > P_VALUE


def test_draw_without_replacement_takes_zeros_last() -> None:
    drawn = draw_without_replacement(DRAFTERS["half_support"].expand(500, V), 4, seeded())
    assert (drawn[:, :2].sort(1).values == torch.tensor([1, 3])).all()
    assert all(len(set(row)) == 4 for row in drawn.tolist())


# --- following the target's choice ------------------------------------------------------------------------------------


def random_tree(generator: torch.Generator, rows: int, size: int, width: int, vocab: int) -> DraftTree:
    """Trees of random shape whose siblings differ, as drafted ones do."""
    growth = TreeGrowth.start(torch.randn(rows, vocab, generator=generator).log_softmax(-1), width)
    while growth.num_candidates < size:
        growth = growth.expand(growth.frontier(), torch.randn(rows, width, vocab, generator=generator).log_softmax(-1))
    return growth.prune(torch.zeros(rows, dtype=torch.long), size)


def naive_walk(tree: DraftTree, choice: list[list[int]], row: int) -> tuple[list[int], int]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    path = [0]
    while True:
        wanted = choice[row][path[-1]]
        step = [i for i in range(1, tree.size) if parents[i] == path[-1] and tokens[i] == wanted]
        if not step:
            return path, wanted
        path.append(step[0])


@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_greedy_walk_matches_a_naive_walk(seed: int, size: int, width: int) -> None:
    generator = seeded(seed)
    tree = random_tree(generator, rows=4, size=size, width=width, vocab=4)
    choice = torch.randint(0, 4, (4, size), generator=generator)
    accepted = accept_greedy(tree, choice)
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
    accepted = accept_greedy(tree, choice)
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


def test_chain_path_equals_tree_path() -> None:
    tokens = torch.randint(0, 2, (200, 5), generator=seeded(3))
    choice = torch.randint(0, 2, (200, 5), generator=seeded(4))
    tree = DraftTree.chain(tokens)
    fast, general = acceptance._follow_chain(tree, choice), acceptance._follow_tree(tree, choice)
    assert fast.length.unique().numel() == 5
    assert torch.equal(tokens_added(fast, tree)[:, 0], tokens_added(general, tree)[:, 0])
    for field in ("length", "bonus", "best"):
        assert torch.equal(getattr(fast, field), getattr(general, field)), field


def test_root_alone_yields_the_targets_token() -> None:
    tree = DraftTree.chain(torch.zeros(ROWS, 1, dtype=torch.long))
    for accept in (accept_sampled_target, accept_rejection):
        accepted = accept(tree, P.expand(ROWS, 1, V), generator=seeded())
        assert (accepted.length == 1).all()
        assert chi_square(accepted.bonus, P) > P_VALUE


# --- one position -----------------------------------------------------------------------------------------------------

Rule = Callable[..., Acceptance]


def sampled_star(q: Tensor, children: int, seed: int, support: Tensor | None = None) -> DraftTree:
    """A root with `children` draws from `q`."""
    drawn = draw_without_replacement(q.expand(ROWS, -1), children, seeded(seed))
    draft_ids = torch.nn.functional.pad(drawn, (1, 0))
    tokens = draft_ids if support is None else support[draft_ids]
    proposal = Proposal(q.expand(ROWS, 1, -1), draft_ids, support)
    return StaticTopology.from_paths([(rank,) for rank in range(children)]).tree(tokens, proposal)


def first_tokens(accept: Rule, tree: DraftTree, seed: int = 1) -> Tensor:
    accepted = accept(tree, P.expand(ROWS, tree.size, V), generator=seeded(seed))
    return tokens_added(accepted, tree)[:, 0]


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


def draft_chain(last: Tensor, q_table: Tensor, generator: torch.Generator, drafts: int = 2) -> DraftTree:
    tokens, probs = [last], []
    for _ in range(drafts):
        probs.append(q_table[tokens[-1]])
        tokens.append(draw(probs[-1], generator))
    ids = torch.stack(tokens, dim=1)
    return DraftTree.chain(ids, Proposal(torch.stack(probs, dim=1), ids))


def draft_longer_chain(last: Tensor, q_table: Tensor, generator: torch.Generator) -> DraftTree:
    return draft_chain(last, q_table, generator, drafts=4)


def draft_sampled_tree(last: Tensor, q_table: Tensor, generator: torch.Generator) -> DraftTree:
    """Root with 3 children, the first with 2 and the second with 1."""
    topology = StaticTopology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
    level1 = draw_without_replacement(q_table[last], 3, generator)
    level2 = draw_without_replacement(q_table[level1], 2, generator)  # (B, 3, 2)
    ids = torch.cat([last[:, None], level1, level2[:, 0], level2[:, 1, :1]], dim=1)
    return topology.tree(ids, Proposal(q_table[ids[:, :3]], ids))


def few(q: Tensor) -> tuple[Tensor, Tensor]:
    """The four likeliest of `q (..., V)` renormalised, and their ids: what top-k leaves a drafter."""
    kept = q.topk(4)
    return kept.values / kept.values.sum(-1, keepdim=True), kept.indices


def draft_chain_of_few(last: Tensor, q_table: Tensor, generator: torch.Generator, drafts: int = 2) -> DraftTree:
    tokens, choices, drawn_from = [last], [torch.zeros_like(last)[:, None]], []
    numbers = draw_numbers((len(last), drafts), 4, last.device, generator)
    for number in numbers.unbind(1):
        drawn_from.append(few(q_table[tokens[-1]]))
        choices.append(draw(drawn_from[-1][0], numbers=number)[:, None])
        tokens.append(to_target_ids(choices[-1], drawn_from[-1][1]).squeeze(1))
    return DraftTree.chain(torch.stack(tokens, 1), Proposal.of_levels(choices, *zip(*drawn_from, strict=True)))


def draft_sampled_tree_of_few(last: Tensor, q_table: Tensor, generator: torch.Generator) -> DraftTree:
    """Root with 3 children, the first with 2."""
    topology = StaticTopology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1)])
    probs, ids = few(q_table[last])
    above = draw_without_replacement(probs, 3, generator)
    children = ids.gather(1, above)
    below_probs, below_ids = few(q_table[children])  # (B, 3, 4)
    below = draw_without_replacement(below_probs[:, 0], 2, generator)
    tokens = torch.cat([last[:, None], children, below_ids[:, 0].gather(1, below)], dim=1)
    levels = ((probs, ids), (below_probs.flatten(0, 1), below_ids.flatten(0, 1)))
    choices = (torch.zeros_like(last)[:, None], above, below)
    return topology.tree(tokens, Proposal.of_levels(choices, *zip(*levels, strict=True)))


def draft_dynamic_tree(last: Tensor, q_table: Tensor, generator: torch.Generator) -> DraftTree:
    growth = TreeGrowth.start(q_table[last].log(), 3)
    growth = growth.expand(growth.frontier(), q_table[growth.frontier().draft_ids].log())
    return growth.prune(last, 7)


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


# --- seeds, devices, rules --------------------------------------------------------------------------------------------


def test_the_generator_alone_decides() -> None:
    tree = sampled_star(DRAFTERS["good"], 3, seed=15)
    first, again, other = (first_tokens(accept_rejection, tree, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    from_global = draw(P.expand(100, V))
    torch.manual_seed(3)
    assert torch.equal(from_global, draw(P.expand(100, V)))


class HostSyncs(TorchDispatchMode):
    """Collects operators that make the host wait for values on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for i in arg
        )
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("way_to_draw")
def test_no_rule_waits_for_the_device() -> None:
    last, q_table, p_table = torch.zeros(3, dtype=torch.long), random_table(2), random_table(1)
    support = torch.tensor([5, 0, 3, 1])
    with HostSyncs() as syncs:
        for draft in (draft_chain, draft_chain_of_few, draft_sampled_tree, draft_dynamic_tree):
            tree = draft(last, q_table, seeded())
            probs = p_table[tree.tokens]
            tokens_added(accept_sampled_target(tree, probs), tree)
            accept_greedy(tree, probs.argmax(-1))
            if tree.proposal is not None:
                tokens_added(accept_rejection(tree, probs), tree)
        star = sampled_star(torch.full((4,), 0.25), 2, seed=1, support=support)
        accept_rejection(star, P.expand(ROWS, 3, V))
    assert syncs.found == []


def test_host_sync_detector_can_fail() -> None:
    with HostSyncs() as syncs:
        P[P > 0.1]
        P[0].item()
    assert len(syncs.found) >= 2


def test_choose_rule_by_setting() -> None:
    assert choose_rule(do_sample=False) is AcceptanceRule.GREEDY
    assert choose_rule(do_sample=False, dynamic_tree=True) is AcceptanceRule.GREEDY
    assert choose_rule(do_sample=True) is AcceptanceRule.REJECTION
    assert choose_rule(do_sample=True, dynamic_tree=True) is AcceptanceRule.SAMPLED_TARGET


def measure_rules(p: Tensor, q: Tensor, generator: torch.Generator) -> list[float]:
    """Chain by target-only and by rejection, then four children by target-only and by rejection."""
    top = q.topk(4, dim=-1).indices
    drawn = draw_without_replacement(q, 4, generator)
    ids = torch.nn.functional.pad(drawn, (1, 0))
    tree = StaticTopology.from_paths([(0,), (1,), (2,), (3,)]).tree(ids, Proposal(q[:, None], ids))
    accepted = accept_rejection(tree, p[:, None].expand(-1, 5, -1), generator=generator)
    chances = (
        target_acceptance(p, top[:, :1]),
        rejection_acceptance(p, q),
        target_acceptance(p, top),
        (accepted.length > 1).float(),
    )
    return [float(chance.mean()) for chance in chances]


@pytest.mark.parametrize(
    ("temperature", "noise", "documented"),
    [
        (0.5, 0.5, (0.68, 0.83, 0.94, 0.98)),
        (0.5, 2.0, (0.36, 0.42, 0.69, 0.73)),
        (1.0, 0.5, (0.45, 0.85, 0.73, 0.97)),
        (1.0, 2.0, (0.27, 0.48, 0.55, 0.74)),
        (1.0, "flat", (0.47, 0.32, 0.75, 0.57)),
    ],
)
def test_choose_rule_table(temperature: float, noise: float | str, documented: tuple[float, ...]) -> None:
    generator = seeded(6)
    logits = 4.0 * torch.randn(4000, 512, generator=generator)
    if isinstance(noise, float):
        draft_logits = logits + noise * torch.randn(logits.shape, generator=generator)
    else:
        draft_logits = logits / 3
    p, q = torch.softmax(logits / temperature, -1), torch.softmax(draft_logits / temperature, -1)
    assert measure_rules(p, q, generator) == pytest.approx(documented, abs=0.03)
