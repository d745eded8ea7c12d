"""What is drafted in a round: a chain, a tree of fixed shape, or a tree that follows the drafter's confidence.

Deterministic drafts take the likeliest tokens; sampled ones are drawn from the drafter's own distribution `q`,
processed as the target's is, and carry that `q` along (`Proposal`), which is what makes their acceptance lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .drafting import Belief, DraftSession, DraftState, WholeChain
from .generation_settings import DraftLength
from .processing import DraftWarping
from .sampling import draw, draw_without_replacement, likeliest
from .topology import StaticTopology
from .tree import DraftTree, Proposal, TreeGrowth

# Draft logits (B, Vd) and the target ids drafted so far, each (B,), to processed scores (B, Vd) or (B, V).
DraftScores = Callable[[Tensor, Sequence[Tensor]], Tensor]


def propose_chain(
    session: DraftSession,
    roots: Tensor,
    length: DraftLength,
    *,
    sample: bool,
    scores: DraftScores | None = None,
) -> DraftTree:
    """Draft tokens one after the other, until the chain is long enough or too doubtful.

    Ending a chain looks only at what was drafted so far, never at the target, so acceptance stays lossless.

    Args:
        session: has absorbed everything up to `roots`.
        roots: `(B,)` the last token of each row.
        length: most tokens, and the doubt that ends a chain earlier (for all rows at once).
        sample: draw from `q` instead of taking the likeliest token.
        scores: the target's processors on draft logits; `None` leaves them as they are.
    """
    if length.floor == 0 and (scores is None or isinstance(scores, DraftWarping)):
        whole = session.draft_at_once(length.depth, sample=sample, warping=scores)
        if whole is not None:
            return _as_drafted(whole, roots, session.drafter.draft_ids)
    state = session.root
    tokens, draft_ids, sampled_from = [roots], [roots], []
    reduced = session.drafter.draft_ids
    confidence = [1.0] * roots.shape[0]  # of each row, how sure the drafter has been of every step so far
    for step in range(length.depth):
        logits = state.logits[:, 0]  # (B, Vd)
        ranked = logits if scores is None else scores(logits, tokens[1:])  # (B, Vd) or (B, V)
        if sample or length.floor:
            belief = state.belief if scores is None else Belief.of(ranked)
            choice = draw(belief.probs) if sample else belief.likeliest
            if sample:
                sampled_from.append(belief.probs)
        else:
            choice = likeliest(ranked)
        in_draft_vocabulary = ranked.shape[-1] == logits.shape[-1]
        draft_ids.append(choice)
        tokens.append(session.target_ids(choice) if in_draft_vocabulary else choice)
        if not in_draft_vocabulary:
            reduced = None
        if step + 1 == length.depth:
            break
        if length.floor:
            # The largest probability, sampled or not: an unlikely draw from a flat distribution is accepted as often
            # as the flat one agrees with the target's, which the draw's own probability says nothing about.
            confidence = [before * now for before, now in zip(confidence, belief.largest.tolist(), strict=True)]
            if max(confidence) < length.floor:
                break
        state = session.step(tokens[-1][:, None], state.feedback, after=step, depth=step)
    proposal = Proposal(torch.stack(sampled_from, 1), torch.stack(draft_ids, 1), reduced) if sample else None
    return DraftTree.chain(torch.stack(tokens, 1), proposal)


def _as_drafted(whole: WholeChain, roots: Tensor, draft_to_target: Tensor | None) -> DraftTree:
    tokens, draft_ids = (torch.cat((roots[:, None], ids), dim=1) for ids in (whole.tokens, whole.draft_ids))
    return DraftTree.chain(tokens, None if whole.probs is None else Proposal(whole.probs, draft_ids, draft_to_target))


def propose_dynamic_tree(session: DraftSession, roots: Tensor, depth: int, *, top_k: int, size: int) -> DraftTree:
    """Grow a tree by cumulative draft probability and keep its `size` best nodes (EAGLE-2 §4.1).

    Args:
        session, roots: as in `propose_chain`.
        depth: levels.
        top_k: nodes expanded per level, and children tried per node.
        size: nodes kept, root included; fewer if the levels hold fewer.
    """
    state = session.root
    growth = TreeGrowth.start(_logprobs(state)[:, 0], top_k)
    feedback = state.feedback.expand(-1, top_k, -1)  # the root's, for each of its children
    for level in range(1, depth):
        frontier = growth.frontier
        state = session.step(
            session.target_ids(frontier.draft_ids),
            feedback,
            after=(level - 1) * top_k,
            depth=level - 1,
            ancestors=frontier.ancestors,
        )
        growth = growth.expand(_logprobs(state))
        rows = growth.frontier.parent_rows
        feedback = state.feedback.gather(1, rows[..., None].expand(-1, -1, state.feedback.shape[-1]))
    return growth.prune(roots, min(size, growth.num_candidates + 1), session.drafter.draft_ids)


def propose_static_tree(
    session: DraftSession,
    roots: Tensor,
    topology: StaticTopology,
    *,
    sample: bool,
    scores: DraftScores | None = None,
) -> DraftTree:
    """Fill a fixed shape: each node's children are its likeliest tokens, or draws from `q` without replacement.

    Args:
        session, roots, sample, scores: as in `propose_chain`; `scores` must keep to the draft vocabulary.
        topology: the shape.
    """
    batch = roots.shape[0]
    state = session.root
    draft_ids, probs = [roots[:, None]], []
    level_ancestors = torch.zeros(batch, 1, 0, dtype=torch.bool, device=roots.device)
    done = 0
    for index, level in enumerate(topology.levels):
        ranked, chosen = _children(state, max(level.ranks) + 1, sample=sample, scores=scores)  # (B, above, k)
        if sample:
            probs.append(ranked)
        parents = torch.tensor(level.parent_rows, device=roots.device)
        ids = chosen[:, parents, torch.tensor(level.ranks, device=roots.device)]  # (B, n)
        draft_ids.append(ids)
        if index + 1 == len(topology.levels):
            break
        own = torch.eye(len(parents), dtype=torch.bool, device=roots.device).expand(batch, -1, -1)
        level_ancestors = torch.cat((level_ancestors[:, parents], own), dim=2)
        state = session.step(
            session.target_ids(ids),
            state.feedback[:, parents],
            after=done,
            depth=index,
            ancestors=level_ancestors,
        )
        done += len(parents)
    all_ids = torch.cat(draft_ids, dim=1)  # (B, N)
    tokens = torch.cat((roots[:, None], session.target_ids(all_ids[:, 1:])), dim=1)
    proposal = Proposal(torch.cat(probs, 1), all_ids, session.drafter.draft_ids) if sample else None
    return topology.tree(tokens, proposal)


def _children(state: DraftState, count: int, *, sample: bool, scores: DraftScores | None) -> tuple[Tensor, Tensor]:
    """`count` child ids `(B, T, count)` of each position, and what they were taken from `(B, T, Vd)`."""
    logits = state.logits.float()
    if scores is not None:
        logits = scores(logits.flatten(0, 1), ()).view_as(logits)
    if not sample:
        return logits, logits.topk(count, dim=-1).indices
    probs = logits.softmax(-1)
    return probs, draw_without_replacement(probs, count)


def _logprobs(state: DraftState) -> Tensor:
    return state.logits.float().log_softmax(-1)
