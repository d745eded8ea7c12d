"""What the drafter's graphs compute: one step, what is read after a round, a whole chain, a whole tree.

They take a `FixedShapeCache` and the slots they write in it, and give NamedTuples of tensors (`graphs.Graphs`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import draw_draft, grow_tree
from ..drafter.session import DraftState, NextTokenProbs
from ..sampling.logits_processing import DraftWarping
from ..trees.draft_tree import DraftTree, Proposal, to_target_ids
from ..trees.shape import DraftShape
from .fixed_cache import FixedShapeCache
from .graph_makers import Step

Rotary = tuple[Tensor, Tensor]  # cosines and sines (B, T, d)


class StepOutput(NamedTuple):
    """Logits `(B, T, Vd)`, feedback `(B, T, H)` and, of a single position, the distribution that follows from them."""

    logits: Tensor
    feedback: Tensor
    next_token: NextTokenProbs | None = None


class DraftedChain(NamedTuple):
    """A drafted chain of `K` tokens.

    Attributes:
        probs, choices, support: of its `Proposal` if it was drawn; `support` only where each draw had one of its own.
        tokens: `(B, K)` target ids.
    """

    probs: Tensor | None
    tokens: Tensor
    choices: Tensor | None
    support: Tensor | None

    def to_tree(self, roots: Tensor, depth: int, draft_ids: Tensor | None) -> DraftTree:
        """Its first `depth` tokens behind `roots (B,)`; `draft_ids` are the target ids of a reduced vocabulary."""
        tokens = torch.cat((roots[:, None], self.tokens[:, :depth]), dim=1)
        if self.probs is None or self.choices is None:
            return DraftTree.chain(tokens)
        support = draft_ids if self.support is None else self.support[:, :depth]
        return DraftTree.chain(tokens, Proposal(self.probs[:, :depth], self.choices[:, : depth + 1], support))


class GrownTree(NamedTuple):
    """Fields of a dynamic `DraftTree`, and the logits `(B, k, Vd)` of its first level, by which a graph is checked."""

    first_level: Tensor
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    scores: Tensor

    def to_tree(self, shape: DraftShape) -> DraftTree:
        most = self.tokens.shape[1] - 1
        return DraftTree(
            self.tokens,
            self.parents,
            self.depths,
            self.ancestors,
            max_depth=min(shape.depth, most),
            max_children=min(shape.top_k, most),
            scores=self.scores,
        )


def draft_step(drafter: Eagle31Drafter, *, single: bool = False) -> Step:
    """Of `T` positions of one depth; with `single` of one position, whose next token's distribution is computed too."""

    def draft(
        tokens: Tensor, feedback: Tensor, slots: Tensor, rotary: Rotary, mask: Tensor | None, cache: FixedShapeCache
    ) -> StepOutput:
        block = cache.at(slots)
        if mask is None:
            mask = block.mask(feedback.dtype)
        out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, block)  # type: ignore[arg-type]
        logits = drafter.draft_logits(out.normed)
        return StepOutput(logits, out.feedback, NextTokenProbs.of(logits[:, 0]) if single else None)

    return draft


def absorb_step(drafter: Eagle31Drafter) -> Step:
    """What `DraftSession.read` computes, of positions padded to one number."""

    def absorb(
        tokens: Tensor, aux: Tensor, slots: Tensor, rotary: Rotary, last: Tensor, cache: FixedShapeCache
    ) -> StepOutput:
        hidden, block = drafter.fuse_aux(aux), cache.at(slots)
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, block.mask(hidden.dtype), block)  # type: ignore[arg-type]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
        return StepOutput(logits, out.feedback[rows, last][:, None], NextTokenProbs.of(logits[:, 0]))

    return absorb


def tree_step(drafter: Eagle31Drafter, shape: DraftShape) -> Step:
    """A dynamic tree as `grow_tree` grows it; writes `top_k * (depth - 1)` slots."""
    ids, top_k = drafter.draft_ids, shape.top_k

    def tree(
        root: Tensor, feedback: Tensor, slots: Tensor, roots: Tensor, rotary: Rotary, cache: FixedShapeCache
    ) -> GrownTree:
        levels: list[Tensor] = []

        def step(tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor) -> DraftState:
            block = cache.at(slots[:, after : after + top_k])
            cos, sin = (table[:, depth : depth + 1] for table in rotary)
            mask = block.mask(feedback.dtype, ancestors)
            out = drafter.decode(drafter.embed(tokens), feedback, (cos, sin), mask, block)  # type: ignore[arg-type]
            levels.append(drafter.draft_logits(out.normed))
            return DraftState(levels[-1], out.feedback)

        grown = grow_tree(DraftState(root, feedback), step, ids, roots, shape)
        assert grown.scores is not None, "a dynamic tree has them"
        return GrownTree(levels[0], grown.tokens, grown.parents, grown.depths, grown.ancestors, grown.scores)

    return tree


class ChainSampling(NamedTuple):
    """How a chain's tokens are chosen.

    Attributes:
        sample: draw them; else take the likeliest.
        warping: the target's processors, if they are drawn; `None` leaves scores as they are.
    """

    sample: bool
    warping: DraftWarping | None

    @property
    def key(self) -> tuple:
        return self.sample, () if self.warping is None else self.warping.key

    def distribution(self, logits: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is drawn from after draft logits `(B, Vd)`: `(B, S)` float32, and the target ids of its entries (see
        `Proposal.support`)."""
        ranked, ids = (logits.float(), None) if self.warping is None else self.warping.candidates(logits)
        return ranked.softmax(-1), draft_ids if ids is None else ids if draft_ids is None else draft_ids[ids]


def chain_step(drafter: Eagle31Drafter, depth: int, sampling: ChainSampling) -> Step:
    """A chain of `depth` tokens; the last one is not stepped over, though it has a slot."""
    ids, draft, sample = drafter.draft_ids, draft_step(drafter), sampling.sample

    def chain(
        root: Tensor, feedback: Tensor, slots: Tensor, rotary: Rotary, numbers: Tensor | None, cache: FixedShapeCache
    ) -> DraftedChain:
        logits, tokens = root, []  # (B, 1) each
        choices, drawn_from = [torch.zeros_like(slots[:, :1])], []
        for k in range(depth):
            if sample:
                assert numbers is not None
                drawn_from.append(sampling.distribution(logits[:, -1], ids))
                probs, support = drawn_from[-1]
                choices.append(draw_draft(probs, numbers[:, k])[:, None])
                tokens.append(to_target_ids(choices[-1], support))
            else:
                tokens.append(to_target_ids(logits[:, -1].argmax(-1)[:, None], ids))
            if k + 1 < depth:
                here = slice(k, k + 1)
                cos, sin = (table[:, here] for table in rotary)
                logits, feedback, _ = draft(tokens[-1], feedback, slots[:, here], (cos, sin), None, cache)
        drafted = torch.cat(tokens, 1)
        if not sample:
            return DraftedChain(None, drafted, None, None)
        proposal = Proposal.of_levels(choices, *zip(*drawn_from, strict=True))
        own = proposal.support if proposal.support is not None and proposal.support.dim() == 3 else None
        return DraftedChain(proposal.probs, drafted, proposal.choices, own)

    return chain
