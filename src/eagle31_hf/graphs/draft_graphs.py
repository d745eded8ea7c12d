"""What the drafter's graphs compute: one step, what is read after a round, a whole chain, a whole tree.

They take a `FixedShapeCache` and the slots they write in it, and give NamedTuples of tensors (`graphs.Graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import BARE_CHOICE, DraftChoice, grow_tree
from ..drafter.session import DraftState
from ..drafting.draft_tree import DraftTree, to_target_ids
from ..drafting.shape import DraftShape
from ..sampling.draw import argmax, choose, likeliest
from ..sampling.logits_processing import DraftWarping
from .fixed_cache import FixedShapeCache
from .steps import Step

Rotary = tuple[Tensor, Tensor]  # cosines and sines (B, T, d)


class DraftNodes(NamedTuple):
    """A draft as graphs take and give it: of a tree what `DraftTree` has, of a chain tokens `(B, N)` alone."""

    tokens: Tensor
    parents: Tensor | None = None
    depths: Tensor | None = None
    ancestors: Tensor | None = None
    scores: Tensor | None = None

    @classmethod
    def of(cls, tree: DraftTree, shape: DraftShape) -> DraftNodes:
        """To be accepted."""
        return cls(tree.tokens, tree.parents, tree.depths, tree.ancestors) if shape.is_tree else cls(tree.tokens)

    def to_tree(self, shape: DraftShape, depth: int | None = None) -> DraftTree:
        """Made for this shape, of no more than `depth` levels."""
        if self.parents is None:
            return DraftTree.chain(self.tokens if depth is None else self.tokens[:, : depth + 1])
        most = self.tokens.shape[1] - 1
        sizes = {"max_depth": min(shape.depth, most), "max_children": min(shape.top_k, most)}
        tree = DraftTree(*self[:4], **sizes, scores=self.scores)  # type: ignore[arg-type]
        return tree if depth is None else tree.cut_to(depth)


class Drafted(NamedTuple):
    """A draft, and by what its graph is checked: of a chain the distribution `(B, 1, S)` that the first token was
    chosen by, of a tree the logits `(B, k, Vd)` of its first level."""

    checked: Tensor
    nodes: DraftNodes


def draft_step(drafter: Eagle31Drafter) -> Step:
    """Of `T` positions of one depth."""

    def draft(
        tokens: Tensor, feedback: Tensor, slots: Tensor, rotary: Rotary, mask: Tensor | None, cache: FixedShapeCache
    ) -> DraftState:
        cache.at(slots)
        if mask is None:
            mask = cache.mask(feedback.dtype)
        out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, cache)
        return DraftState(drafter.draft_logits(out.normed), out.feedback)

    return draft


def rotary_of(drafter: Eagle31Drafter, slots: Tensor, count: int, tables: Rotary | None) -> Rotary:
    """Rotations `(B, count, d)` of positions from the first of the slots `(B, T)` on, which are positions, too; or the
    `tables` of a drafter that must be told them."""
    if tables is not None:
        return tables
    return drafter.rotary(slots[:, :1] + torch.arange(count, device=slots.device))


def absorb_step(drafter: Eagle31Drafter) -> Step:
    """What `DraftSession.read` computes, of positions padded to one number."""

    def absorb(
        tokens: Tensor, aux: Tensor, slots: Tensor, rotary: Rotary, last: Tensor, cache: FixedShapeCache
    ) -> DraftState:
        hidden = drafter.fuse_aux(aux)
        mask = cache.at(slots).mask(hidden.dtype)
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, mask, cache)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
        return DraftState(logits, out.feedback[rows, last][:, None])

    return absorb


class ChosenBy(NamedTuple):
    """What of the text decides, beside scores, which tokens are chosen.

    Attributes:
        noise: `(B, n, V)` of the next positions; `None`: the text is greedy.
        seen: `(B, V)` which tokens it has; `None`: no processor asks.
    """

    noise: Tensor | None = None
    seen: Tensor | None = None

    def to(self, device: torch.device) -> ChosenBy:
        """The same on this device."""
        return ChosenBy(*(None if each is None else each.to(device) for each in self))


@dataclass(frozen=True)
class GraphChoice:
    """How a graph chooses tokens.

    Attributes:
        draws: by noise; else the likeliest is taken.
        warping: the target's processors; `None` where drafts cannot be shown to them.
        checks: the target's token is `V`, which is none, where no score is a number. So it is of drawn ones.
    """

    draws: bool
    warping: DraftWarping | None
    checks: bool = False

    @property
    def key(self) -> tuple:
        """Of the target's tokens."""
        key = self.draws, () if self.warping is None else self.warping.key
        return (*key, "checked") if self.checks and not self.draws else key

    def of_target(self, logits: Tensor, by: ChosenBy) -> Tensor:
        """The target's token after each node, `(B, N)`, by its logits, noise and what was seen there `(B, N, V)`."""
        if self.warping is not None and (self.warping.key or self.draws):
            logits = self.warping.of_nodes(logits, by.seen)
        if by.noise is not None:
            return choose(logits, by.noise)
        return likeliest(logits) if self.checks else argmax(logits)

    @property
    def draft_key(self) -> tuple:
        """Of draft tokens."""
        warping = self._of_drafts
        return self.draws, () if warping is None else warping.key

    def of_drafts(self, by: ChosenBy) -> DraftChoice:
        """Of draft tokens."""
        warping = self._of_drafts
        return DraftChoice(warping, *by) if self.draws or warping is not None else BARE_CHOICE

    @property
    def _of_drafts(self) -> DraftWarping | None:
        """Of a greedy draft processors that look at scores alone change nothing."""
        warping = self.warping
        return warping if warping is not None and warping.key and (self.draws or warping.needs_seen) else None


class DraftInputs(NamedTuple):
    """What a whole draft starts from.

    Attributes:
        root, feedback: the drafter's logits `(B, 1, Vd)` and feedback `(B, 1, H)` behind each row's last token.
        slots: `(B, S)` that the draft writes.
        roots: `(B,)` the last token of each row.
        rotary: of its levels; `None`: made from the slots.
        by: what tokens are chosen by.
    """

    root: Tensor
    feedback: Tensor
    slots: Tensor
    roots: Tensor
    rotary: Rotary | None
    by: ChosenBy


def chain_step(drafter: Eagle31Drafter, depth: int, choosing: GraphChoice) -> Step:
    """A chain of `depth` tokens; the last one is not stepped over, though it has a slot."""
    ids, draft = drafter.draft_ids, draft_step(drafter)

    def chain(told: DraftInputs, cache: FixedShapeCache) -> Drafted:
        root, feedback, slots, roots, rotary, by = told
        rotary = rotary_of(drafter, slots, depth, rotary)
        choice, logits, tokens, first = choosing.of_drafts(by), root, [roots[:, None]], root  # tokens: (B, 1) each
        for k in range(depth):
            scores, support = choice.rank(logits[:, -1], (), ids, depth=k)
            first = scores[:, None].softmax(-1, dtype=torch.float32) if k == 0 else first
            tokens.append(to_target_ids(argmax(scores)[:, None], support))
            if k + 1 < depth:
                here = slice(k, k + 1)
                cos, sin = (table[:, here] for table in rotary)
                logits, feedback = draft(tokens[-1], feedback, slots[:, here], (cos, sin), None, cache)
        return Drafted(first, DraftNodes(torch.cat(tokens, 1)))

    return chain


def tree_step(drafter: Eagle31Drafter, shape: DraftShape, choosing: GraphChoice) -> Step:
    """A dynamic tree as `grow_tree` grows it; writes `top_k * (depth - 1)` slots."""
    ids, top_k, draft = drafter.draft_ids, shape.top_k, draft_step(drafter)

    def tree(told: DraftInputs, cache: FixedShapeCache) -> Drafted:
        levels: list[Tensor] = []
        turned = rotary_of(drafter, told.slots, shape.depth - 1, told.rotary)

        def step(tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor) -> DraftState:
            slots = told.slots[:, after : after + top_k]
            cos, sin = (table[:, depth : depth + 1] for table in turned)
            mask = cache.at(slots).mask(feedback.dtype, ancestors)
            state: DraftState = draft(tokens, feedback, slots, (cos, sin), mask, cache)
            levels.append(state.logits)
            return state

        choice = choosing.of_drafts(told.by)
        grown = grow_tree(DraftState(told.root, told.feedback), step, ids, told.roots, shape, choice)
        nodes = DraftNodes(grown.tokens, grown.parents, grown.depths, grown.ancestors, grown.scores)
        return Drafted(levels[0], nodes)

    return tree


def whole_step(drafter: Eagle31Drafter, shape: DraftShape, choosing: GraphChoice) -> Step:
    """A whole draft of this shape."""
    return tree_step(drafter, shape, choosing) if shape.is_tree else chain_step(drafter, shape.depth, choosing)
