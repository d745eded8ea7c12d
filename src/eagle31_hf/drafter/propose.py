"""What is drafted in a round: a chain, a tree of fixed shape, or a tree that follows the drafter's confidence.

Deterministic drafts take the likeliest tokens; sampled ones are drawn from the drafter's own distribution `q`,
processed as the target's is, and carry that `q` along (`Proposal`), which is what makes their acceptance lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..generation_config import DraftLength
from ..sampling.draw import argmax, draw, draw_numbers, draw_without_replacement
from ..sampling.logits_processing import DraftWarping
from ..trees.draft_tree import DraftTree, Proposal, to_target_ids
from ..trees.dynamic import TreeGrowth
from ..trees.shape import DraftShape
from .session import DraftState, NextTokenProbs

# Draft logits (B, Vd) and the target ids drafted so far, each (B,), to processed scores (B, Vd) or (B, V).
DraftScores = Callable[[Tensor, Sequence[Tensor]], Tensor]


class DraftStepper(Protocol):
    """What drafts are made with: a `DraftSession`, or graphs of one."""

    draft_ids: Tensor | None

    @property
    def root(self) -> DraftState:
        """State after the last absorbed position of each row."""
        ...

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        """One recurrent draft step; see `DraftSession.step`."""
        ...


def propose_chain(
    session: DraftStepper,
    roots: Tensor,
    length: DraftLength,
    *,
    sample: bool,
    scores: DraftScores | None = None,
    num_random_steps: int | None = None,
) -> DraftTree:
    """Draft tokens one after the other, until the chain is long enough or too doubtful.

    Ending a chain looks only at what was drafted so far, never at the target, so acceptance stays lossless.

    Args:
        session: has absorbed everything up to `roots`.
        roots: `(B,)` the last token of each row.
        length: most tokens, and the doubt that ends a chain earlier (for all rows at once).
        sample: draw from `q` instead of taking the likeliest token.
        scores: the target's processors on draft logits; `None` leaves them as they are.
        num_random_steps: tokens that random numbers are taken for, at least `length.depth`; default: just these.

    Where top-k decides what may be drawn, only that many candidates are drawn from and remembered.
    """
    state = session.root
    tokens, choices, drawn_from = [roots], [torch.zeros_like(roots)[:, None]], []
    numbers = (
        chain_numbers(state.logits, num_random_steps or length.depth, scores) if sample else None
    )  # (B, K, 1 or S)
    confidence = [1.0] * roots.shape[0]  # of each row, how sure the drafter has been of every step so far
    for step in range(length.depth):
        ranked, support = _ranked(session, state.logits[:, 0], scores, tokens[1:])  # (B, S)
        if sample or length.min_confidence:
            following = state.next_token if scores is None else NextTokenProbs.of(ranked)
            choice = following.argmax if numbers is None else draw_draft(following.probs, numbers[:, step])
            if sample:
                choices.append(choice[:, None])
                drawn_from.append((following.probs, support))
        else:
            choice = argmax(ranked)
        tokens.append(to_target_ids(choice[:, None], support).squeeze(1))
        if step + 1 == length.depth:
            break
        if length.min_confidence:
            # The largest probability, sampled or not: an unlikely draw from a flat distribution is accepted as often
            # as the flat one agrees with the target's, which the draw's own probability says nothing about.
            confidence = [before * now for before, now in zip(confidence, following.largest.tolist(), strict=True)]
            if max(confidence) < length.min_confidence:
                break
        state = session.step(tokens[-1][:, None], state.feedback, after=step, depth=step)
    proposal = Proposal.of_levels(choices, *zip(*drawn_from, strict=True)) if sample else None
    return DraftTree.chain(torch.stack(tokens, 1), proposal)


def draw_draft(probs: Tensor, numbers: Tensor) -> Tensor:
    """`draw`, but any token where `probs` are NaN: the decoder sees that and lets the draft go."""
    return draw(probs, numbers=numbers).clamp_(max=probs.shape[-1] - 1)


def chain_numbers(logits: Tensor, depth: int, scores: DraftScores | None) -> Tensor:
    """Random numbers `(B, depth, 1 or S)` to draw a chain by, after draft logits `(B, T, Vd)`."""
    width = scores.width(logits.shape[-1]) if isinstance(scores, DraftWarping) else None
    return draw_numbers((len(logits), depth), width, logits.device)


def _ranked(
    session: DraftStepper, logits: Tensor, scores: DraftScores | None, drafted: Sequence[Tensor] = (), at_least: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Scores `(B, S)` of at least so many candidates after draft logits `(B, Vd)`, and their `Proposal.support`."""
    reduced = session.draft_ids
    if scores is None:
        return logits, reduced
    if isinstance(scores, DraftWarping):
        ranked, draft_ids = scores.candidates(logits, at_least)
        return ranked, reduced if draft_ids is None else to_target_ids(draft_ids, reduced)
    ranked = scores(logits, drafted)
    return ranked, reduced if ranked.shape[-1] == logits.shape[-1] else None


def propose_dynamic_tree(session: DraftStepper, roots: Tensor, shape: DraftShape) -> DraftTree:
    """Grow a tree by cumulative draft probability and keep its best nodes (EAGLE-2 §4.1).

    Args:
        session, roots: as in `propose_chain`.
        shape: levels, nodes expanded per level and children tried per node, nodes kept.
    """
    return grow_tree(session.root, session.step, session.draft_ids, roots, shape)


def grow_tree(
    state: DraftState,
    step: Callable[..., DraftState],
    draft_to_target: Tensor | None,
    roots: Tensor,
    shape: DraftShape,
) -> DraftTree:
    """`propose_dynamic_tree` from a root's `state`, by a `step` that takes what `DraftSession.step` does."""
    top_k = shape.top_k
    growth = TreeGrowth.start(_logprobs(state)[:, 0], top_k)
    for level in range(1, shape.depth):
        frontier = growth.frontier()
        feedback = state.feedback.gather(1, frontier.parent_rows[..., None].expand(-1, -1, state.feedback.shape[-1]))
        state = step(
            to_target_ids(frontier.draft_ids, draft_to_target),
            feedback,
            after=(level - 1) * top_k,
            depth=level - 1,
            ancestors=frontier.ancestors,
        )
        growth = growth.expand(frontier, _logprobs(state))
    return growth.prune(roots, shape.nodes, draft_to_target)


def propose_static_tree(
    session: DraftStepper,
    roots: Tensor,
    shape: DraftShape,
    *,
    sample: bool,
    scores: DraftScores | None = None,
) -> DraftTree:
    """Fill a fixed shape: each node's children are its likeliest tokens, or draws from `q` without replacement.

    Args:
        session, roots, sample, scores: as in `propose_chain`; `scores` must keep to the draft vocabulary.
        shape: what to draft; `depth` levels of its static tree may be accepted.
    """
    assert shape.static is not None, "a tree of fixed shape"
    topology = shape.static
    batch, device = roots.shape[0], roots.device
    most = 1 + max(rank for level in topology.levels for rank in level.ranks)  # children of a node
    state = session.root
    tokens, choices, drawn_from = [roots[:, None]], [torch.zeros_like(roots)[:, None]], []
    level_ancestors = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
    done = 0
    for index, level in enumerate(topology.levels):
        ranked, support = _ranked(session, state.logits.flatten(0, 1), scores, at_least=most)  # (B*above, S)
        if sample:
            drawn_from.append((ranked.float().softmax(-1), support))
            drawn = draw_without_replacement(drawn_from[-1][0], most)
        else:
            drawn = ranked.topk(most, dim=-1).indices  # (B*above, most)
        parents, ranks = torch.tensor(level.parent_rows, device=device), torch.tensor(level.ranks, device=device)
        choices.append(drawn.view(batch, -1, most)[:, parents, ranks])  # (B, n)
        tokens.append(to_target_ids(drawn, support).view(batch, -1, most)[:, parents, ranks])
        if index + 1 == len(topology.levels):
            break
        own = torch.eye(len(parents), dtype=torch.bool, device=device).expand(batch, -1, -1)
        level_ancestors = torch.cat((level_ancestors[:, parents], own), dim=2)
        state = session.step(tokens[-1], state.feedback[:, parents], after=done, depth=index, ancestors=level_ancestors)
        done += len(parents)
    proposal = Proposal.of_levels(choices, *zip(*drawn_from, strict=True)) if sample else None
    return topology.tree(torch.cat(tokens, 1), proposal).cut_to(shape.depth)


def _logprobs(state: DraftState) -> Tensor:
    return state.logits.float().log_softmax(-1)  # quicker on a CPU than with `dtype`
