"""Lossless acceptance: which drafted tokens to keep so that the output is the target's own. Pure and seeded.

Three rules, each a function of one round's `DraftTree` and what the target said at its nodes:

    accept_greedy           follow the target's arg-max                        (temperature 0)
    accept_sampled_target   draw the target's token first, keep it if drafted  (children chosen in any way)
    accept_rejection        as much as `p / q` allows, then draw what is left  (children drawn from a known `q`)

`choose_rule` says which accepts most where. Random numbers come from `generator` (`None`: torch's global one), on the
device of the probabilities. Nothing waits for the device.

`B` batch, `N` nodes with the root, `D` longest path without the root, `V` / `Vd` target / draft vocabulary, `S` tokens
that could be drafted after a node, `p` / `q` target / draft distribution. Probabilities are float32, warped
(temperature, top-p, ...) as the user asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from .tree import DraftTree, Proposal


@dataclass(frozen=True)
class Acceptance:
    """What one round yields.

    Attributes:
        path: `(B, D+1)` accepted nodes from the root down; entries from `count` on are padding: valid node numbers
            that mean nothing.
        count: `(B,)` accepted nodes, root included.
        bonus: `(B,)` the token the target adds after the last accepted node, the next round's root.
        best: `(B,)` last accepted node.
    """

    path: Tensor
    count: Tensor
    bonus: Tensor
    best: Tensor


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(weights: Tensor, generator: torch.Generator | None = None, *, numbers: Tensor | None = None) -> Tensor:
    """Draw one index per row, `weights (..., V)` -> `(...)` int64; weights are non-negative and need not sum to 1.

    Inverts the cumulative sum, in float64 so that rare tokens keep their exact share; an index of weight 0 is never
    drawn. On one CPU core, rows x 8192 weights: 17 us for 1 row and 78 us for 8, against 178 and 1344 us for
    `torch.multinomial`, which needs a random number per index instead of one per row.

    A row of zeros or NaN yields `V`, out of range on purpose: the next lookup fails instead of inventing a token.

    Args:
        numbers: what to draw with: `(..., 1)` of `uniform_numbers`, or `(..., V)` of `draw_numbers`, by which indices
            race for being drawn (two operations instead of five); default: new uniform ones.
    """
    if numbers is not None and numbers.shape[-1] > 1:
        return (numbers / weights).min(-1).indices  # x / 0 is infinite: never first
    if numbers is None:
        numbers = uniform_numbers((*weights.shape[:-1], 1), weights.device, generator)
    invert = _invert if weights.numel() < DRAWN_BY_BLOCKS else _invert_by_blocks
    return invert(weights, numbers).squeeze(-1)


DRAWN_BY_BLOCKS = 100_000
"""Weights from which on `draw` sums blocks first. On two CPU cores 24 rows of 8,192 take 0.1 ms instead of 5, one row
of 128,256 0.12 instead of 0.16, 24 of these 1.6 instead of 18; 6 rows of 8,192 would take twice as long."""

BLOCK = 64
"""Weights of a block."""


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Where the cumulative sum of `weights (..., V)` exceeds the share `numbers (..., 1)` of its end, `(..., 1)`."""
    cumulative = weights.cumsum(-1, dtype=_wide_dtype(weights.device))
    threshold = numbers * cumulative[..., -1:]  # < the end: the numbers are below 1
    return torch.searchsorted(cumulative, threshold, right=True)


def _invert_by_blocks(weights: Tensor, numbers: Tensor) -> Tensor:
    """`_invert`, which first finds the block and then the index in it: no running sum over all weights is written."""
    vocabulary = weights.shape[-1]
    if vocabulary % BLOCK:
        weights = F.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.unflatten(-1, (-1, BLOCK))  # (..., n, BLOCK)
    sums = blocks.sum(-1, dtype=_wide_dtype(weights.device))  # (..., n)
    ends = sums.cumsum(-1)
    threshold = numbers * ends[..., -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp(max=sums.shape[-1] - 1)  # (..., 1); zeros have none
    # How far into the block, as a share of it: below 1 again, whatever rounding does.
    share = 1 - (ends.gather(-1, block) - threshold) / sums.gather(-1, block)
    share = share.clamp(0, 1 - torch.finfo(share.dtype).eps / 2)
    chosen = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK)).squeeze(-2)  # (..., BLOCK)
    return (block * BLOCK + _invert(chosen, share)).clamp(max=vocabulary)


def likeliest(scores: Tensor) -> Tensor:
    """Index of the largest of each row, `(..., V)` -> `(...)`; of equal ones the first, as `argmax`."""
    return scores.max(-1).indices  # `argmax` takes two to three times as long on a CPU in bf16


def draw_without_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `k` different indices per row one after another, `probs (..., V)` -> `(..., k)` int64 in drawing order.

    An exponential race (the `k` smallest of `Exp(1) / p`; Gumbel top-k, arXiv 1903.06059): the same distribution as
    drawing, removing and renormalising `k` times. With fewer than `k` indices of positive probability the rest of the
    row is filled with indices of probability 0, which `accept_rejection` never accepts.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    # noise / p and not p / noise: 0 / 0 is NaN, which sorts as largest and so loses a race for the smallest.
    return (noise / probs).topk(k, dim=-1, largest=False, sorted=True).indices


def uniform_numbers(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Random numbers from 0 to below 1, in the precision draws are made in."""
    return torch.rand(shape, dtype=_wide_dtype(device), device=device, generator=generator)


def draw_numbers(
    draws: tuple[int, int], width: int | None, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Random numbers for `draws` `(B, K)` of one token each: `(B, K, width)` to race by, or `(B, K, 1)` uniform ones.

    Args:
        width: candidates of each draw, if they are few (top-k): an exponential number for each then costs little.
    """
    if width is None or width == 1:
        return uniform_numbers((*draws, 1), device, generator)
    return torch.empty((*draws, width), device=device).exponential_(generator=generator)


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple GPUs have no float64


# --- following the target's token -------------------------------------------------------------------------------------


def accept_greedy(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent.

    Args:
        tree: drafts of the round.
        target_choice: `(B, N)` the target's token after each node: its arg-max, or its sample.
    """
    return _follow_chain(tree, target_choice) if tree.is_chain else _follow_tree(tree, target_choice)


def accept_sampled_target(
    tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None
) -> Acceptance:
    """Draw the target's token at every node, then keep the longest path that agrees.

    A child `x` is accepted with probability `p(x)`, and what is emitted instead follows `p` restricted to tokens that
    are no children: the reference `evaluate_posterior` in one draw. The draws do not look at the drafts, so this is
    lossless however the tree was made, pruned dynamic trees included.

    Args:
        tree: drafts of the round.
        target_probs: `(B, N, V)` the target's distribution after each node.
        generator: source of random numbers.
    """
    return accept_greedy(tree, draw(target_probs, generator))


def _follow_chain(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    return chain_acceptance(tree, *judge_by_choice(tree.tokens, target_choice))


def judge_by_choice(tokens: Tensor, target_choice: Tensor) -> tuple[Tensor, Tensor]:
    """`accept_greedy` of a chain on tensors alone: the last accepted node and the bonus, `(B,)` each."""
    matches = tokens[:, 1:] == target_choice[:, :-1]
    best = matches.cumprod(1).sum(1)
    return best, target_choice.gather(1, best[:, None]).squeeze(1)


def chain_acceptance(tree: DraftTree, best: Tensor, bonus: Tensor) -> Acceptance:
    """A chain accepted down to node `best (B,)`, with the token `bonus (B,)` after it."""
    return Acceptance(path=tree.depths, count=best + 1, bonus=bonus, best=best)  # in a chain, node = depth


def _follow_tree(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    mismatch = tree.tokens != target_choice.gather(1, tree.parents)  # (B, N)
    # A node is refused if any node above it, itself included but not the root, is not what the target chose.
    refused = (tree.ancestors[:, :, 1:] & mismatch[:, None, 1:]).any(2)
    best = tree.depths.masked_fill(refused, -1).argmax(1)
    path, count = tree.path_to(best)
    return Acceptance(path, count, target_choice.gather(1, best[:, None]).squeeze(1), best)


# --- rejection sampling -----------------------------------------------------------------------------------------------


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
    return chain_acceptance(tree, *judge_block(tree.tokens, _proposal_of(tree), target_probs, *numbers))


def rejection_numbers(tree: DraftTree, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The random numbers a chain's rejection takes: `(B, K)` to accept by and `(B, 1)` for the bonus."""
    device, batch = tree.tokens.device, tree.tokens.shape[0]
    drafts, bonus = uniform_numbers((batch, tree.size), device, generator).split((tree.size - 1, 1), dim=1)
    return drafts, bonus


def judge_block(
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
    path, count = tree.path_to(best)
    return Acceptance(path, count, draw(remaining, generator), best)


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


# --- which rule -------------------------------------------------------------------------------------------------------


class AcceptanceRule(Enum):
    """How drafts are chosen and accepted; see `choose_rule`."""

    GREEDY = "greedy"
    SAMPLED_TARGET = "sampled_target"
    REJECTION = "rejection"


def choose_rule(*, do_sample: bool, dynamic_tree: bool = False) -> AcceptanceRule:
    """The lossless rule that accepts most.

    - Temperature 0: `GREEDY`, whatever the tree.
    - Sampling, chain or static tree: `REJECTION` with children drawn from `q`, the drafter's distribution at the
      target's temperature; chains are judged as blocks, trees child by child.
    - Sampling, dynamic tree: `SAMPLED_TARGET`. Its shape is chosen by the drafts' probabilities, so its children
      are no draws from `q` and rejection sampling would not be lossless.

    Chance that one position accepts a draft, deterministic top-k children (`SAMPLED_TARGET`) against sampled ones
    (`REJECTION`); synthetic logits over 512 tokens, `z = 4 * N(0, 1)` for the target and `z + s * N(0, 1)` for the
    drafter, 40000 positions (`test_choose_rule_table` measures it again on 4000):

        temperature   s        chain: target / rejection   4 children: target / rejection
        0.5           0.5            0.68 / 0.83                     0.94 / 0.98
        0.5           2.0            0.36 / 0.42                     0.69 / 0.73
        1.0           0.5            0.45 / 0.85                     0.73 / 0.97
        1.0           2.0            0.27 / 0.48                     0.55 / 0.74
        1.0           flat           0.47 / 0.32                     0.75 / 0.57

    The last row is the exception: a drafter with the right order but three times the temperature, `z / 3`. Where
    `rejection_acceptance` on real drafts stays below `target_acceptance`, draft deterministically instead.
    """
    if not do_sample:
        return AcceptanceRule.GREEDY
    return AcceptanceRule.SAMPLED_TARGET if dynamic_tree else AcceptanceRule.REJECTION


def target_acceptance(p: Tensor, children: Tensor) -> Tensor:
    """Chance that `accept_sampled_target` takes one of `children (..., k)`, target ids, given `p (..., V)`: `(...)`."""
    return p.gather(-1, children).sum(-1)


def rejection_acceptance(p: Tensor, q: Tensor, draft_to_target: Tensor | None = None) -> Tensor:
    """Chance that a single draft drawn from `q (..., Vd)` is accepted: `sum min(p, q) = 1 - TV(p, q)`, `(...)`."""
    p_drafted = p if draft_to_target is None else p[..., draft_to_target]
    return torch.minimum(p_drafted, q).sum(-1)
