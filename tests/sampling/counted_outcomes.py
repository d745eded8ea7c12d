"""Vocabularies small enough to count every outcome (chi-square), drafters good and bad, and drafts drawn from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from eagle31_hf.sampling.acceptance import Acceptance
from eagle31_hf.sampling.draw import draw, draw_numbers, draw_without_replacement
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
