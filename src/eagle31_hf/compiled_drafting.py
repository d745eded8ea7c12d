"""The drafter's compiled steps: what it reads after a round, a draft step, and a whole chain of fixed length.

See `acceleration` for what is compiled when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .acceleration import NODE_BUCKET, SLOT_BUCKET, PlacedSteps, slot_bucket
from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import CompiledSteps, Step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftSession, DraftState, WholeChain
from .processing import DraftWarping
from .proposing import chain_numbers, grow_tree
from .sampling import draw
from .tree import DraftTree, Proposal, chosen_ids


class CompiledDraftSession(DraftSession):
    """A draft session whose steps are compiled, and what it absorbs after a round unless that is unusually much."""

    def __init__(self, drafter: Eagle31Drafter, *, batch_size: int, capacity: int, block: int):
        super().__init__(
            drafter, batch_size=batch_size, capacity=slot_bucket(capacity + NODE_BUCKET), block=slot_bucket(block)
        )
        self.cache.slab = SLOT_BUCKET
        self.steps = CompiledSteps.of(drafter)
        self.placed = PlacedSteps(self.cache)
        self.first_rows = batch_size
        self.tree_depth = 0  # of the deepest tree so far
        self.chain_depth = 0  # of the deepest chain so far; shallower ones are cut from it

    def draft_at_once(self, depth: int, *, sample: bool, warping: DraftWarping | None = None) -> WholeChain | None:
        self.chain_depth = deepest = max(depth, self.chain_depth)
        rows = self.cache.batch_size
        self.cache.place(1)
        if self.steps.why_not or not self.placed.make_room(deepest):
            return None
        (slots,) = self.cache.mask_widths.values()
        way = (sample, () if warping is None else warping.key)
        shape = ("chain", rows, deepest, slots, way)
        known = self.steps.has(shape)
        if not known and (rows != self.first_rows or not self.steps.takes("chain", way)):
            return None
        inputs = self._chain_inputs(depth, deepest, sample=sample, warping=warping)
        if not known:
            chain = _DraftChain(self.drafter, deepest, sample=sample, warping=warping)
            expected = chain.belief(self.root.logits[:, 0])[0][:, None] if sample else None
            self.steps.add(shape, chain.as_step(), inputs, expected)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        return _whole_chain(outputs, depth, self.draft_ids)

    def tree_at_once(self, roots: Tensor, depth: int, *, top_k: int, size: int) -> DraftTree | None:
        self.tree_depth = deepest = max(depth, self.tree_depth)
        rows, nodes = self.cache.batch_size, top_k * (depth - 1)  # that are stepped over
        if self.steps.why_not or not nodes:
            return None
        if depth < deepest:  # the last of a text, not worth a graph
            return grow_tree(self.root, super().step, self.draft_ids, roots, depth, top_k=top_k, size=size)
        self.cache.place(1)
        if not self.placed.make_room(nodes):
            return None
        (slots,) = self.cache.mask_widths.values()
        shape = ("tree", rows, depth, top_k, size, slots)
        known = self.steps.has(shape)
        if not known and rows != self.first_rows:
            return None
        inputs = self._tree_inputs(roots, depth - 1, nodes)
        if not known:
            first = _logits_of_first_level(self.root, super().step, self.target_ids, top_k)
            self.steps.add(shape, _tree_step(self.drafter, depth, top_k=top_k, size=size), inputs, first)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        _, scores, tokens, parents, depths, ancestors = outputs
        nodes = tokens.shape[1]
        return DraftTree(
            tokens, parents, depths, ancestors,
            max_depth=min(depth, nodes - 1), max_children=min(top_k, nodes - 1), scores=scores,
        )  # fmt: skip

    def _tree_inputs(self, roots: Tensor, depths: int, nodes: int) -> tuple:
        fill, root = self.placed.inputs.fill, self.root
        self._rotary_at(depths)
        assert self._rotary is not None, "just made"
        cos, sin = (table[:, :depths] for table in self._rotary)  # (B, depths, d)
        self.placed.point_at(0, nodes)
        return (
            fill("root", root.logits, tuple(root.logits.shape)),
            fill("feedback", root.feedback, tuple(root.feedback.shape)),
            fill("roots", roots, tuple(roots.shape)),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            self.placed.fixed,
        )

    def _chain_inputs(self, depth: int, deepest: int, *, sample: bool, warping: DraftWarping | None) -> tuple:
        fill, root = self.placed.inputs.fill, self.root
        self._rotary_at(deepest)
        assert self._rotary is not None, "just made"
        cos, sin = (table[:, :deepest] for table in self._rotary)  # (B, deepest, d)
        self.placed.point_at(0, deepest)
        numbers = None
        if sample:  # those a chain of this depth drawn step by step takes
            numbers = chain_numbers(root.logits, depth, warping)
            numbers = fill("numbers", numbers, (len(numbers), deepest, numbers.shape[2]))
        return (
            fill("root", root.logits, tuple(root.logits.shape)),
            fill("feedback", root.feedback, tuple(root.feedback.shape)),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            numbers,
            self.placed.fixed,
        )

    def read(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> DraftState:
        rows, size = tokens.shape
        self.cache.place(size)
        if size > NODE_BUCKET or self._root is None or self.steps.why_not or not self.placed.make_room(NODE_BUCKET):
            return super().read(tokens, aux, rotary, counts)
        (slots,) = self.cache.mask_widths.values()
        shape = ("absorb", rows, NODE_BUCKET, slots)
        known = self.steps.has(shape)
        if not known and rows != self.first_rows:
            return super().read(tokens, aux, rotary, counts)
        inputs = self._read_inputs(tokens, aux, rotary, counts)
        outputs = self.steps.run(shape, inputs)
        if outputs is not None:
            return _single_state(outputs)
        state = super().read(tokens, aux, rotary, counts)
        if not known:
            self.steps.add(shape, _absorb_step(self.drafter), inputs, state.logits)
        return state

    def _read_inputs(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> tuple:
        fill, rows, (cos, sin) = self.placed.inputs.fill, tokens.shape[0], rotary
        self.placed.point_at(0, NODE_BUCKET)
        last = torch.tensor([max(count - 1, 0) for count in counts], device=self.device)
        return (
            fill("tokens", tokens, (rows, NODE_BUCKET)),
            fill("aux", aux, (rows, NODE_BUCKET, aux.shape[-1])),
            (
                fill("cos", cos, (cos.shape[0], NODE_BUCKET, cos.shape[2])),
                fill("sin", sin, (sin.shape[0], NODE_BUCKET, sin.shape[2])),
            ),
            fill("last", last, (rows,)),
            self.placed.fixed,
        )

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        rows, size = tokens.shape
        width = 1 << (size - 1).bit_length()
        self.cache.place(size, after=after)
        if self.steps.why_not or not self.placed.make_room(after + width):
            return super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        (slots,) = self.cache.mask_widths.values()
        mask = self._mask(ancestors, (rows, 1, width, slots))
        shape = ("step", rows, width, slots, mask is not None)
        known = self.steps.has(shape)
        if not known and rows != self.first_rows:
            return super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        inputs = self._inputs(tokens, feedback, after, depth, mask)
        outputs = self.steps.run(shape, inputs)
        if outputs is not None:
            return _single_state(outputs) if size == 1 else DraftState(outputs[0][:, :size], outputs[1][:, :size])
        state = super().step(tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        if not known:
            step = _draft_step(self.drafter)
            self.steps.add(shape, _believing(step) if width == 1 else step, inputs, state.logits)
        return state

    def _mask(self, ancestors: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """`None` for a chain, whose mask the graph makes itself."""
        mask = None if ancestors is None else self.cache.attention_mask(ancestors, dtype=self.drafter.dtype)
        return None if mask is None else self.placed.inputs.fill_mask("mask", mask, shape)  # type: ignore[arg-type]

    def _inputs(self, tokens: Tensor, feedback: Tensor, after: int, depth: int, mask: Tensor | None) -> tuple:
        fill, (rows, size) = self.placed.inputs.fill, tokens.shape
        width = 1 << (size - 1).bit_length()
        cos, sin = self._rotary_at(depth)
        self.placed.point_at(after, width)
        return (
            fill("tokens", tokens, (rows, width)),
            fill("feedback", feedback, (rows, width, feedback.shape[-1])),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            mask,
            self.placed.fixed,
        )


def _draft_step(drafter: Eagle31Drafter) -> Step:
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


def _believing(step: Step) -> Step:
    """The step of a single position with the drafter's belief computed in the same graph."""

    def believe(*inputs: Any) -> tuple[Tensor, ...]:
        logits, feedback = step(*inputs)
        return logits, feedback, *Belief.of(logits[:, 0])

    return believe


def _single_state(outputs: tuple[Tensor, ...]) -> DraftState:
    logits, feedback, *belief = outputs
    return DraftState(logits, feedback, Belief(*belief))


def _absorb_step(drafter: Eagle31Drafter) -> Step:
    def absorb(
        tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], last: Tensor, cache: FixedShapeCache
    ) -> tuple[Tensor, ...]:
        hidden = drafter.fuse_aux(aux)
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, cache.block_mask(hidden.dtype), cache)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
        return logits, out.feedback[rows, last][:, None], *Belief.of(logits[:, 0])

    return absorb


def _logits_of_first_level(
    root: DraftState, step: Callable[..., DraftState], target_ids: Callable[[Tensor], Tensor], top_k: int
) -> Tensor:
    """What a tree's graph is checked by: logits `(B, top_k, Vd)` of the root's children."""
    children = root.logits[:, 0].float().topk(top_k).indices  # (B, top_k)
    alone = torch.eye(top_k, dtype=torch.bool, device=children.device).expand(len(children), -1, -1)
    feedback = root.feedback.expand(-1, top_k, -1)
    return step(target_ids(children), feedback, after=0, depth=0, ancestors=alone).logits


def _tree_step(drafter: Eagle31Drafter, depth: int, *, top_k: int, size: int) -> Step:
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


class _DraftChain:
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
        ids, draft = self.drafter.draft_ids, _draft_step(self.drafter)

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


def _whole_chain(outputs: tuple[Tensor, ...], depth: int, reduced: Tensor | None) -> WholeChain:
    """The first `depth` tokens of what `_DraftChain.as_step` gave."""
    if len(outputs) == 1:
        return WholeChain(outputs[0][:, :depth], None)
    probs, tokens, choices, *own = outputs
    support = own[0][:, :depth] if own else reduced
    return WholeChain(tokens[:, :depth], Proposal(probs[:, :depth], choices[:, : depth + 1], support))
