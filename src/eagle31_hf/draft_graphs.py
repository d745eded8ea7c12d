"""What the drafter's graphs compute: a step, what is read after a round, a whole chain, a tree, and a round's end.

They are for `CompiledSteps.add` and take a `FixedShapeCache`, whose `block.slots` say where they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import Step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftState
from .processing import DraftWarping
from .proposing import grow_tree
from .sampling import draw, judge_block, judge_by_choice, likeliest
from .tree import Proposal, chosen_ids


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


class ChainAdvance:
    """From one verified chain to the next: judge it, read what was accepted, draft again.

    Args:
        depth: tokens of both chains.
        sample: judge by rejection and draw; else by the target's arg-max.
        warping: the target's processors, which look at scores alone.
    """

    def __init__(self, drafter: Eagle31Drafter, depth: int, *, sample: bool, warping: DraftWarping):
        self.drafter, self.depth, self.sample, self.warping = drafter, depth, sample, warping

    def judge(
        self, logits: Tensor, tokens: Tensor, proposal: tuple[Tensor | None, ...], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The last accepted node and the bonus, `(B,)` each.

        Args:
            logits: the target's `(B, K+1, V)`.
            tokens: `(B, K+1)`, root first.
            proposal: fields of a sampled chain's `Proposal`.
            numbers: of a sampled chain, what `rejection_numbers` gives.
        """
        if not self.sample:
            return judge_by_choice(tokens, likeliest(self.warping(logits.flatten(0, 1))).view(tokens.shape))
        return judge_block(tokens, Proposal(*proposal), self.warping.probs(logits), *numbers)  # type: ignore[arg-type]

    def as_step(self) -> Step:
        """The drafter's logits and feedback after the bonus, `judge`'s two, and a new chain as `DraftChain` gives it.

        The cache's slots and the rotary tables reach from the first node over all that may be accepted to the end of
        the chain behind it, `2K + 1` columns.
        """
        depth, judge, absorb = self.depth, self.judge, absorb_step(self.drafter)
        draft = DraftChain(
            self.drafter, depth, sample=self.sample, warping=self.warping if self.sample else None
        ).as_step()

        def advance(
            logits: Tensor,
            tokens: Tensor,
            proposal: tuple[Tensor | None, ...],
            judge_numbers: Sequence[Tensor],
            draft_numbers: Tensor,
            aux: Tensor,
            rotary: tuple[Tensor, Tensor],
            cache: FixedShapeCache,
        ) -> tuple[Tensor, ...]:
            best, bonus = judge(logits, tokens, proposal, judge_numbers)
            slots, size = cache.block.slots, depth + 1
            cache.block.slots = slots[:, :size]
            cos, sin = (table[:, :size] for table in rotary)
            root, feedback, *_ = absorb(following(tokens, best, bonus), aux, (cos, sin), best, cache)
            rows = torch.arange(len(best), device=best.device)[:, None]
            behind = best[:, None] + torch.arange(1, size, device=best.device)  # (B, K)
            cache.block.slots = slots[rows, behind]
            cos, sin = (table[rows, behind] for table in rotary)
            drafted = draft(root, feedback, (cos, sin), draft_numbers, cache)
            cache.block.slots = slots
            return root, feedback, best, bonus, *drafted

        return advance


def following(tokens: Tensor, best: Tensor, bonus: Tensor) -> Tensor:
    """The token after each node of a chain `(B, N)` that was accepted down to `best (B,)`; rejected ones after that."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(nodes == best[:, None], bonus[:, None], tokens.roll(-1, 1))
