"""Trees whose shape follows the drafter's confidence: grown level by level, then pruned (EAGLE-2 §4.1; EAGLE-3).

Nothing here waits for the device, so a tree can be grown in a graph. `k` is top-k; other letters as in `draft_tree`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree, ancestors_from_parents, to_target_ids
from ..drafting.shape import DraftShape
from .propose import BARE_CHOICE, DraftChoice
from .session import DraftState


def grow_tree(
    state: DraftState,
    step: Callable[..., DraftState],
    draft_to_target: Tensor | None,
    roots: Tensor,
    shape: DraftShape,
    choice: DraftChoice = BARE_CHOICE,
) -> DraftTree:
    """The candidates of highest cumulative probability, as EAGLE-3's `topK_genrate` finds them.

    Level 1 holds the root's best `k` tokens; each further one the best `k` children of the `k` best nodes of the level
    before. Candidates are numbered in that order from 0 and the root is -1, so parents precede children; scores are
    sums of log-probabilities, so they never rise along a path. Left out of the reference: its unused score threshold.

    Args:
        state: of the root.
        step: takes what `DraftSession.step` does.
        draft_to_target: target ids of a reduced draft vocabulary.
        roots: `(B,)` the last token of each row.
        shape: levels, nodes expanded per level and children tried per node, nodes kept.
        choice: how tokens are chosen; its scores must keep to the draft vocabulary.
    """
    top_k = shape.top_k
    draft_ids: list[Tensor] = []  # of the candidates of each level, (B, k), then (B, k * k)
    scores: list[Tensor] = []
    expanded: list[Tensor] = []  # numbers of the nodes each level hangs below, (B, 1), then (B, k)
    numbers = torch.full_like(roots[:, None], -1)
    above = torch.zeros_like(numbers, dtype=torch.float32)  # scores of the same nodes
    seen: Tensor | None = None  # (B, k, levels * k); which nodes stepped over so far each of them may see
    own = torch.eye(top_k, dtype=torch.bool, device=roots.device).expand(len(roots), -1, -1)
    for level in range(shape.depth):
        logprobs, tokens = _logprobs(state, choice, draft_to_target, level).topk(top_k, dim=-1)  # (B, n, k)
        first = sum(each.shape[1] for each in scores)  # number of the level's first candidate
        draft_ids.append(tokens.flatten(1))
        scores.append((above[:, :, None] + logprobs).flatten(1))
        expanded.append(numbers)
        if level + 1 == shape.depth:
            break
        above, best = scores[-1].topk(top_k, dim=1)  # (B, k)
        numbers, parent_rows = first + best, best // top_k
        if seen is not None:
            seen = seen.gather(1, parent_rows[..., None].expand_as(seen))
        seen = own if seen is None else torch.cat([seen, own], dim=2)
        state = step(
            to_target_ids(draft_ids[-1].gather(1, best), draft_to_target),
            state.feedback.gather(1, parent_rows[..., None].expand(-1, -1, state.feedback.shape[-1])),
            after=level * top_k,
            depth=level,
            ancestors=seen,
        )
    kept = _best(torch.cat(scores, dim=1), shape.nodes - 1)
    tokens = to_target_ids(torch.cat(draft_ids, dim=1).gather(1, kept), draft_to_target)
    parents = _places(torch.cat(expanded, dim=1).gather(1, kept // top_k), kept)
    ancestors = ancestors_from_parents(parents, shape.depth)
    return DraftTree(
        tokens=torch.cat([roots[:, None], tokens], dim=1),
        parents=parents,
        depths=ancestors.sum(2) - 1,
        ancestors=ancestors,
        max_depth=min(shape.depth, shape.nodes - 1),
        is_chain=min(top_k, shape.nodes - 1) <= 1,
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """Numbers `(B, count)` of the candidates of highest score, ascending, every one with its ancestors.

    Equal scores (a child the drafter is certain of scores what its parent does) are broken by candidate number: a
    parent has the smaller one, so it is always kept first.
    """
    by_score = scores.sort(dim=1, descending=True, stable=True).indices
    return by_score[:, :count].sort(dim=1).values


def _places(parents: Tensor, kept: Tensor) -> Tensor:
    """Places `(B, N)` of these parents of the kept nodes among them, the root's first: so many come up to each."""
    return torch.nn.functional.pad(torch.searchsorted(kept, parents, right=True), (1, 0))


def _logprobs(state: DraftState, choice: DraftChoice, draft_ids: Tensor | None, level: int) -> Tensor:
    """`(B, T, Vd)` float32 of the tokens after each node of a level, by which a tree is grown."""
    if choice.is_bare:
        return state.logits.float().log_softmax(-1)  # quicker on a CPU than with `dtype`
    batch, nodes, width = state.logits.shape
    everything = width  # a tree's candidates are counted in ids of the draft vocabulary
    ranked, _ = choice.rank(state.logits.flatten(0, 1), (), draft_ids, depth=level, at_least=everything)
    return ranked.float().log_softmax(-1).view(batch, nodes, width)
