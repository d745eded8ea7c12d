"""Rejection sampling: as much of drawn drafts as `p / q` allows, then a draw from what is left. Pure and seeded.

One rule for chains (`accept_block`), one for trees (`accept_tree_rejection`); `accept_rejection` takes either. Letters
as in `acceptance`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..trees.draft_tree import DraftTree, Proposal
from .acceptance import Acceptance, accept_sampled_target, chain_acceptance
from .draw import draw, uniform_numbers


def accept_rejection(tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
    """Rejection sampling of drafts drawn from `tree.proposal`: one rule for chains, another for trees.

    Lossless only if each node's children are *all* its draws, in drawing order, and the shape of the tree did not
    depend on them: never prune sampled children by probability.

    Args:
        tree: drafts of the round, with `proposal`.
        target_probs: `(B, N, V)` the target's distribution after each node.
        generator: source of random numbers.
    """
    if tree.size == 1:
        return accept_sampled_target(tree, target_probs, generator=generator)
    accept = accept_block if tree.is_chain else accept_tree_rejection
    return accept(tree, target_probs, generator=generator)


def accept_block(tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
    """Block verification (Sun et al., arXiv 2403.10444) for a chain of at least one draft: no rule accepts more of it.

    Judged one by one, drafts are accepted with `min(1, p / q)` each, and a token that the drafter likes too much ends
    the chain even if the target makes up for it further on. Here node `i` is reached with probability

        P_i = min(1, P_{i-1} p(x_i) / q(x_i)),  P_0 = 1

    which is never less than the product of those. The chain is kept down to its deepest node that holds with chance

        h_i = (P_i - m_i) / (1 - m_i),  m_i = sum_x min(P_i p(x), q(x)) over the next token, 0 at the last node

    and the bonus is drawn from `max(P_i p - q, 0)` there, after the last node from `p`. The output is the target's as
    long as each draft is drawn from its `q` and the chain's length depends on drafts alone. Arguments as in
    `accept_rejection`.
    """
    numbers = rejection_numbers(tree, generator)
    return chain_acceptance(tree, *block_accept_mask(tree.tokens, _proposal_of(tree), target_probs, *numbers))


def rejection_numbers(tree: DraftTree, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The random numbers a chain's rejection takes: `(B, K)` to accept by and `(B, 1)` for the bonus."""
    device, batch = tree.tokens.device, tree.tokens.shape[0]
    drafts, bonus = uniform_numbers((batch, tree.size), device, generator).split((tree.size - 1, 1), dim=1)
    return drafts, bonus


def block_accept_mask(
    tokens: Tensor, proposal: Proposal, target_probs: Tensor, draft_numbers: Tensor, bonus_number: Tensor
) -> tuple[Tensor, Tensor]:
    """`accept_block` on tensors alone: the last accepted node and the bonus, `(B,)` each.

    Args:
        tokens: `(B, K+1)`, root first.
        proposal: what the drafts were drawn from.
        target_probs: `(B, K+1, V)`.
        draft_numbers, bonus_number: as `rejection_numbers` gives them.
    """
    drafts = tokens.shape[1] - 1  # K
    reached = _chance_to_reach(tokens, proposal, target_probs)  # (B, K+1)
    overlap = _overlap(target_probs[:, 1:drafts], proposal, reached[:, 1:drafts, None])  # (B, K-1)
    overlap = F.pad(overlap, (0, 1))  # nothing follows the last node
    holds = draft_numbers * (1 - overlap) < reached[:, 1:] - overlap  # (B, K)
    best = (holds * torch.arange(1, drafts + 1, device=tokens.device)).amax(1)  # (B,) the deepest, 0 if none

    p_best = _rows_at(target_probs, best) * reached.gather(1, best[:, None])  # (B, V)
    rejected = best.clamp(max=drafts - 1)
    q_best = _rows_at(proposal.probs, rejected)  # (B, S)
    q_best = q_best * (best < drafts)[:, None]  # nothing was rejected after a fully accepted chain
    return best, draw(_residual(p_best, q_best, proposal.support_of(rejected)), numbers=bonus_number)


def _chance_to_reach(tokens: Tensor, proposal: Proposal, target_probs: Tensor) -> Tensor:
    """`P_i` of every node of a chain, `(B, K+1)`, given its tokens (`accept_block`).

    `log P` is a walk that never rises above 0: the sum of all log-ratios, minus the most it ever exceeded 0 by.
    """
    drafts = tokens.shape[1] - 1
    q_drafted = proposal.probs[:, :drafts].gather(2, proposal.choices[:, 1:, None]).squeeze(2)  # (B, K)
    p_drafted = target_probs[:, :drafts].gather(2, tokens[:, 1:, None]).squeeze(2)
    # A draft that `q` rules out was not drawn from it: -inf, never accepted.
    log_ratio = torch.where(q_drafted > 0, p_drafted.log() - q_drafted.log(), -torch.inf)
    walk = F.pad(log_ratio, (1, 0)).cumsum(1)  # (B, K+1), the root at 0
    return (walk - walk.cummax(1).values).exp()


def _overlap(target_probs: Tensor, proposal: Proposal, scale: Tensor) -> Tensor:
    """`sum_x min(scale * p(x), q(x))` at nodes 1, 2, ... of a chain, `target_probs (B, M, V)` -> `(B, M)`."""
    nodes = slice(1, 1 + target_probs.shape[1])
    support = proposal.support
    if support is not None:
        ids = support[:, nodes] if support.dim() == 3 else support.expand(*target_probs.shape[:2], -1)
        target_probs = target_probs.gather(2, ids)  # (B, M, S); `index_select` takes ten times as long on a CPU
    q = proposal.probs[:, nodes]
    return torch.minimum(target_probs * scale, q).sum(2)


def accept_tree_rejection(
    tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None
) -> Acceptance:
    """Multi-round rejection sampling without replacement (SpecInfer, arXiv 2305.09781; RSD, arXiv 2402.14160).

    At each node, for its children `x_1, x_2, ...` in drawing order: accept `x_j` with probability
    `min(1, p_j(x_j) / q_j(x_j))`, else `p_{j+1} = norm(max(p_j - q_j, 0))` and `q_{j+1}` is `q_j` without `x_j`,
    renormalised. Having refused all, draw the bonus from what is left of `p`. One child is `min(1, p / q)`.
    Arguments as in `accept_rejection`.
    """
    children = tree.children()  # (B, N, C)
    best = torch.zeros_like(tree.tokens[:, 0])
    walking = torch.ones_like(best, dtype=torch.bool)
    remaining = target_probs[:, 0]  # (B, V) what the bonus is drawn from if the walk ends here
    for _ in range(tree.max_depth):
        candidates = _rows_at(children, best) * walking[:, None]  # 0 means no child: a walk that ended stays put
        accepted, remaining = _try_children(tree, best, candidates, remaining, generator)
        walking = accepted > 0
        best = torch.where(walking, accepted, best)
        remaining = torch.where(walking[:, None], _rows_at(target_probs, best), remaining)
    path, length = tree.path_to(best)
    return Acceptance(path, length, draw(remaining, generator), best)


def _try_children(
    tree: DraftTree, parent: Tensor, candidates: Tensor, p: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """One node's rounds: `candidates (B, C)`, `p (B, V)` -> accepted child `(B,)`, 0 if none, and `p` left `(B, V)`."""
    proposal = _proposal_of(tree)
    parent = parent.clamp(max=proposal.probs.shape[1] - 1)
    q, support = _rows_at(proposal.probs, parent), proposal.support_of(parent)  # (B, S)
    tokens = tree.tokens.gather(1, candidates)  # (B, C)
    # Where there is no child this would look up the root, which is nobody's choice.
    choices = proposal.choices.gather(1, candidates).masked_fill(candidates == 0, 0)
    uniform = uniform_numbers(candidates.shape, q.device, generator)
    accepted = torch.zeros_like(parent)
    for rank in range(candidates.shape[1]):
        child, choice = candidates[:, rank], choices[:, rank : rank + 1]
        p_child = p.gather(1, tokens[:, rank : rank + 1]).squeeze(1)
        q_child = q.gather(1, choice).squeeze(1)
        # q_child is 0 once every token of positive probability has been tried: such a child was not drawn from q.
        fits = (uniform[:, rank] * q_child < p_child) & (q_child > 0)
        waiting = (child > 0) & (accepted == 0)
        accepted = torch.where(waiting & fits, child, accepted)
        p = torch.where((waiting & ~fits)[:, None], _residual(p, q, support), p)
        q = q.scatter(1, choice, 0.0)
        q = q / q.sum(1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    return accepted, p


def _residual(p: Tensor, q: Tensor, support: Tensor | None) -> Tensor:
    """`norm(max(p - q, 0))` of one node per row, `p (B, V)`, `q (B, S)` of target ids `support (B, S)` -> `(B, V)`.

    Where `p` and `q` agree up to rounding nothing may be left; a rejection is then itself a rounding event and `p`
    stands in.
    """
    # Subtracted where it lies, never spread out to V; on a CPU `index_add` takes forty times as long.
    left = (p - q if support is None else p.scatter_add(1, support, -q)).clamp_(min=0)
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def _rows_at(values: Tensor, nodes: Tensor) -> Tensor:
    """One node's row of each batch row: `values (B, N, X)`, `nodes (B,)` -> `(B, X)`."""
    return values[torch.arange(len(nodes), device=nodes.device), nodes]


def _proposal_of(tree: DraftTree) -> Proposal:
    assert tree.proposal is not None, "rejection sampling needs the distribution the drafts were drawn from"
    return tree.proposal
