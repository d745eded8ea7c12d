"""What the drafter's graphs compute: a step, what is read after a round, a whole chain, a tree, and a round's end.

They are for `CompiledSteps.add` and take a `FixedShapeCache`, whose `block.slots` say where they write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import Step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftState
from .processing import DraftWarping
from .proposing import grow_tree
from .sampling import accept_greedy, draw, judge_block, judge_by_choice, likeliest
from .tree import DraftTree, Proposal, chosen_ids


def draft_step(drafter: Eagle31Drafter) -> Step:
    def draft(
        tokens: Tensor,
        feedback: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: FixedShapeCache,
    ) -> tuple[Tensor, Tensor]:
        if mask is None:
            mask = cache.block_mask(feedback.dtype)
        out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, cache)
        return drafter.draft_logits(out.normed), out.feedback

    return draft


def believing(step: Step) -> Step:
    """The step of a single position with the drafter's belief computed in the same graph."""

    def believe(*inputs: Any) -> tuple[Tensor, ...]:
        logits, feedback = step(*inputs)
        return logits, feedback, *Belief.of(logits[:, 0])

    return believe


def absorb_step(drafter: Eagle31Drafter) -> Step:
    def absorb(
        tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], last: Tensor, cache: FixedShapeCache
    ) -> tuple[Tensor, ...]:
        hidden = drafter.fuse_aux(aux)
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, cache.block_mask(hidden.dtype), cache)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
        return logits, out.feedback[rows, last][:, None], *Belief.of(logits[:, 0])

    return absorb


def tree_step(drafter: Eagle31Drafter, depth: int, *, top_k: int, size: int) -> Step:
    ids = drafter.draft_ids

    def tree(
        root: Tensor, feedback: Tensor, roots: Tensor, rotary: tuple[Tensor, Tensor], cache: FixedShapeCache
    ) -> tuple[Tensor, ...]:
        slots = cache.block.slots  # (B, top_k * (depth - 1))

        def step(tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor) -> DraftState:
            cache.block.slots = slots[:, after : after + top_k]
            cos, sin = (table[:, depth : depth + 1] for table in rotary)
            mask = cache.block_mask(feedback.dtype, ancestors)
            out = drafter.decode(drafter.embed(tokens), feedback, (cos, sin), mask, cache)
            levels.append(drafter.draft_logits(out.normed))
            return DraftState(levels[-1], out.feedback)

        levels: list[Tensor] = []
        grown = grow_tree(DraftState(root, feedback), step, ids, roots, depth, top_k=top_k, size=size)
        cache.block.slots = slots
        assert grown.scores is not None, "a dynamic tree has them"
        return levels[0], grown.scores, grown.tokens, grown.parents, grown.depths, grown.ancestors

    return tree


class DraftChain:
    """A whole chain of draft steps.

    Args:
        depth: tokens.
        sample: draw them.
        warping: the target's processors, if tokens are drawn.
    """

    def __init__(self, drafter: Eagle31Drafter, depth: int, *, sample: bool, warping: DraftWarping | None):
        self.drafter, self.depth, self.sample, self.warping = drafter, depth, sample, warping

    def belief(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is drawn from, `(B, S)` float32, and the target ids of its entries: see `Proposal.support`."""
        reduced = self.drafter.draft_ids
        ranked, ids = (logits.float(), None) if self.warping is None else self.warping.candidates(logits)
        return ranked.softmax(-1), reduced if ids is None else ids if reduced is None else reduced[ids]

    def as_step(self) -> Step:
        """Of a sampled chain `Proposal.probs`, tokens, choices and supports, if they differ; of a greedy one tokens."""
        depth, sample, belief = self.depth, self.sample, self.belief
        ids, draft = self.drafter.draft_ids, draft_step(self.drafter)

        def chain(
            root: Tensor, feedback: Tensor, rotary: tuple[Tensor, Tensor], numbers: Tensor, cache: FixedShapeCache
        ) -> tuple[Tensor, ...]:
            slots, logits = cache.block.slots, root
            tokens: list[Tensor] = []  # (B, 1) each
            choices, drawn_from = [torch.zeros_like(slots[:, :1])], []
            for k in range(depth):
                if sample:
                    drawn_from.append(belief(logits[:, -1]))
                    probs, support = drawn_from[-1]
                    choices.append(draw(probs, numbers=numbers[:, k])[:, None])
                    tokens.append(chosen_ids(choices[-1], support))
                else:
                    tokens.append(chosen_ids(logits[:, -1].argmax(-1)[:, None], ids))
                if k + 1 < depth:
                    here = slice(k, k + 1)
                    cache.block.slots = slots[:, here]
                    cos, sin = (table[:, here] for table in rotary)
                    logits, feedback = draft(tokens[-1], feedback, (cos, sin), None, cache)
            cache.block.slots = slots
            drafted = torch.cat(tokens, 1)
            if not sample:
                return (drafted,)
            proposal = Proposal.of_levels(choices, *zip(*drawn_from, strict=True))
            own = () if proposal.support is None or proposal.support.dim() == 1 else (proposal.support,)
            return proposal.probs, drafted, proposal.choices, *own

        return chain


@dataclass(frozen=True)
class Judgement:
    """What is left of a draft.

    Attributes:
        tokens: `(B, W)` of the accepted path, root first; behind `last` they mean nothing.
        last: `(B,)` the place of the last accepted one.
        bonus: `(B,)` the token after it.
        path: `(B, W)` nodes of these tokens; `None`: one after the other.
        outputs: what the host is told of it.
    """

    tokens: Tensor
    last: Tensor
    bonus: Tensor
    path: Tensor | None
    outputs: tuple[Tensor, ...]

    def following(self) -> Tensor:
        """The token after each accepted one, `(B, W)`."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return torch.where(places == self.last[:, None], self.bonus[:, None], self.tokens.roll(-1, 1))

    def along(self, aux: Tensor) -> Tensor:
        """Hidden states `(B, W, A*Ht)` of the path, of all nodes' `(B, N, A*Ht)`."""
        if self.path is None:
            return aux
        return aux.gather(1, self.path[..., None].expand(-1, -1, aux.shape[-1]))


@dataclass(frozen=True)
class Advance:
    """From one verified draft to the next: judge it, read what was accepted, draft again.

    Attributes:
        judge: the target's `logits (B, N, V)` and what else it takes of the draft.
        draft: from the drafter's state after the bonus, the bonus `(B,)`, rotary tables, random numbers and the cache.
        width: nodes of the longest path, root included: `W`.
        slots: that drafting writes behind the bonus, for `levels` positions.
    """

    drafter: Eagle31Drafter
    judge: Callable[[Tensor, tuple], Judgement]
    draft: Callable[..., tuple[Tensor, ...]]
    width: int
    slots: int
    levels: int

    def as_step(self) -> Step:
        """The drafter's logits and feedback after the bonus, `Judgement.outputs`, and what `draft` gives.

        The cache's slots `(B, W + slots)` reach from the first node over all that may be accepted to the end of the
        draft behind it, and the rotary tables `(B, W + levels, d)` as far as that is deep.
        """
        width, absorb = self.width, absorb_step(self.drafter)

        def advance(
            logits: Tensor,
            judged: tuple,
            aux: Tensor,
            rotary: tuple[Tensor, Tensor],
            numbers: Tensor | None,
            cache: FixedShapeCache,
        ) -> tuple[Tensor, ...]:
            judgement = self.judge(logits, judged)
            bonus, last = judgement.bonus, judgement.last
            slots = cache.block.slots
            cache.block.slots = slots[:, :width]
            cos, sin = (table[:, :width] for table in rotary)
            root, feedback, *_ = absorb(judgement.following(), judgement.along(aux), (cos, sin), last, cache)
            rows = torch.arange(len(last), device=last.device)[:, None]
            behind = last[:, None] + torch.arange(1, 1 + self.slots, device=last.device)
            cache.block.slots = slots[rows, behind]
            cos, sin = (table[rows, behind[:, : self.levels]] for table in rotary)
            drafted = self.draft(DraftState(root, feedback), bonus, (cos, sin), numbers, cache)
            cache.block.slots = slots
            return root, feedback, *judgement.outputs, *drafted

        return advance


def chain_advance(drafter: Eagle31Drafter, depth: int, *, sample: bool, warping: DraftWarping) -> Advance:
    """From one chain of `depth` tokens to the next.

    What is judged are its tokens `(B, K+1)`, root first, and, of a sampled one, the fields of its `Proposal` and what
    `rejection_numbers` gives.

    Args:
        sample: judge by rejection and draw; else by the target's arg-max.
        warping: the target's processors, which look at scores alone.
    """
    chain = DraftChain(drafter, depth, sample=sample, warping=warping if sample else None).as_step()

    def judge(logits: Tensor, judged: tuple) -> Judgement:
        tokens, proposal, numbers = judged
        if sample:
            best, bonus = judge_block(tokens, Proposal(*proposal), warping.probs(logits), *numbers)
        else:
            best, bonus = judge_by_choice(tokens, _target_choice(warping, logits, None))
        return Judgement(tokens, best, bonus, path=None, outputs=(best, bonus))

    def draft(root: DraftState, _bonus: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return chain(root.logits, root.feedback, *inputs)

    return Advance(drafter, judge, draft, width=depth + 1, slots=depth, levels=depth)


def tree_advance(drafter: Eagle31Drafter, depth: int, *, top_k: int, size: int, warping: DraftWarping) -> Advance:
    """From one dynamic tree to the next, grown as `grow_tree` does.

    What is judged are its tokens, parents, depths and ancestors, and the numbers `(B, N, 1)` by which the target's
    token is drawn at every node; `None`: it is the likeliest.
    """
    longest, children, levels = min(depth, size - 1), min(top_k, size - 1), depth - 1
    tree = tree_step(drafter, depth, top_k=top_k, size=size)

    def judge(logits: Tensor, judged: tuple) -> Judgement:
        tokens, parents, depths, ancestors, numbers = judged
        drafts = DraftTree(tokens, parents, depths, ancestors, max_depth=longest, max_children=children)
        accepted = accept_greedy(drafts, _target_choice(warping, logits, numbers))
        path, count, bonus = accepted.path, accepted.count, accepted.bonus
        outputs = (path, count, bonus, accepted.best)
        return Judgement(tokens.gather(1, path), count - 1, bonus, path, outputs)

    def draft(root: DraftState, bonus: Tensor, rotary: tuple, _numbers: None, cache: FixedShapeCache) -> tuple:
        return tree(root.logits, root.feedback, bonus, rotary, cache)[1:]

    return Advance(drafter, judge, draft, width=longest + 1, slots=top_k * levels, levels=levels)


def _target_choice(warping: DraftWarping, logits: Tensor, numbers: Tensor | None) -> Tensor:
    """The target's token after each node, `(B, N)`, drawn if there are numbers to draw by."""
    if numbers is not None:
        return draw(warping.probs(logits), numbers=numbers)
    return likeliest(warping(logits.flatten(0, 1))).view(logits.shape[:2])
