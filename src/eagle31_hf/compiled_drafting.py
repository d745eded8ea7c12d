"""The drafter's compiled steps: what it reads after a round, a draft step, whole chains and trees.

See `acceleration` for what is compiled when, `draft_graphs` for what graphs compute, and `compiled_round_end` for the
graph that does several of these at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .acceleration import NODE_BUCKET, SLOT_BUCKET, PlacedSteps, slot_bucket
from .compiled_steps import CompiledSteps
from .draft_graphs import DraftChain, absorb_step, believing, draft_step, tree_step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftSession, DraftState, WholeChain
from .processing import DraftWarping
from .proposing import chain_numbers, grow_tree
from .tree import DraftTree, Proposal


@dataclass(frozen=True)
class Ahead:
    """What a round's last graph has done already: nothing of it is committed, and none of it has to be used.

    Attributes:
        state: of the drafter after each row's bonus.
        rotary: tables `(B, T, d)` from the lengths before on.
        width: positions that were read.
        draft: what was drafted behind the bonus.
    """

    state: DraftState
    rotary: tuple[Tensor, Tensor]
    width: int
    draft: WholeChain | DraftTree


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
        self.ahead: Ahead | None = None  # what a `RoundEnd` has left, to be used or not

    def draft_at_once(
        self, depth: int, draws: int, *, sample: bool, warping: DraftWarping | None = None
    ) -> WholeChain | None:
        ahead = self._taken_ahead()
        if isinstance(ahead, WholeChain):
            return _cut_chain(ahead, depth)
        rows = self.cache.batch_size
        self.cache.place(1)
        if self.steps.why_not or not self.placed.make_room(draws):
            return None
        (slots,) = self.cache.mask_widths.values()
        way = (sample, () if warping is None else warping.key)
        shape = ("chain", rows, draws, slots, way)
        known = self.steps.has(shape)
        if not known and (rows != self.first_rows or not self.steps.takes("chain", way)):
            return None
        inputs = self._chain_inputs(draws, sample=sample, warping=warping)
        if not known:
            chain = DraftChain(self.drafter, draws, sample=sample, warping=warping)
            expected = chain.belief(self.root.logits[:, 0])[0][:, None] if sample else None
            self.steps.add(shape, chain.as_step(), inputs, expected)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        return _cut_chain(whole_chain(outputs, self.draft_ids), depth)

    def _taken_ahead(self) -> WholeChain | DraftTree | None:
        ahead, self.ahead = self.ahead, None
        return None if ahead is None else ahead.draft

    def absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> None:
        ahead = self.ahead
        if ahead is None:
            super().absorb(tokens, aux, counts)
        else:
            self._commit(ahead.state, ahead.rotary, counts, ahead.width)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.ahead = None
        super().rollback(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.ahead = None
        super().select_rows(rows)

    def tree_at_once(self, roots: Tensor, depth: int, *, top_k: int, size: int) -> DraftTree | None:
        ahead = self._taken_ahead()
        if isinstance(ahead, DraftTree):
            return _cut_tree(ahead, depth)
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
            self.steps.add(shape, tree_step(self.drafter, depth, top_k=top_k, size=size), inputs, first)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        return grown_tree(outputs[1:], depth, top_k=top_k)

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

    def _chain_inputs(self, depth: int, *, sample: bool, warping: DraftWarping | None) -> tuple:
        fill, root = self.placed.inputs.fill, self.root
        self._rotary_at(depth)
        assert self._rotary is not None, "just made"
        cos, sin = (table[:, :depth] for table in self._rotary)  # (B, depth, d)
        self.placed.point_at(0, depth)
        numbers = None
        if sample:
            numbers = chain_numbers(root.logits, depth, warping)
            numbers = fill("numbers", numbers, tuple(numbers.shape))
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
            self.steps.add(shape, absorb_step(self.drafter), inputs, state.logits)
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
            step = draft_step(self.drafter)
            self.steps.add(shape, believing(step) if width == 1 else step, inputs, state.logits)
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


def _single_state(outputs: tuple[Tensor, ...]) -> DraftState:
    logits, feedback, *belief = outputs
    return DraftState(logits, feedback, Belief(*belief))


def _logits_of_first_level(
    root: DraftState, step: Callable[..., DraftState], target_ids: Callable[[Tensor], Tensor], top_k: int
) -> Tensor:
    """What a tree's graph is checked by: logits `(B, top_k, Vd)` of the root's children."""
    children = root.logits[:, 0].float().topk(top_k).indices  # (B, top_k)
    alone = torch.eye(top_k, dtype=torch.bool, device=children.device).expand(len(children), -1, -1)
    feedback = root.feedback.expand(-1, top_k, -1)
    return step(target_ids(children), feedback, after=0, depth=0, ancestors=alone).logits


def whole_chain(outputs: tuple[Tensor, ...], reduced: Tensor | None) -> WholeChain:
    """What `DraftChain.as_step` gave."""
    if len(outputs) == 1:
        return WholeChain(outputs[0], None)
    probs, tokens, choices, *own = outputs
    return WholeChain(tokens, Proposal(probs, choices, own[0] if own else reduced))


def grown_tree(outputs: tuple[Tensor, ...], depth: int, *, top_k: int) -> DraftTree:
    """What `tree_step` gave, but its first output."""
    scores, tokens, parents, depths, ancestors = outputs
    most = tokens.shape[1] - 1
    return DraftTree(
        tokens, parents, depths, ancestors, max_depth=min(depth, most), max_children=min(top_k, most), scores=scores
    )


def _cut_chain(chain: WholeChain, depth: int) -> WholeChain:
    """Its first `depth` tokens."""
    tokens, proposal = chain
    if depth == tokens.shape[1] or proposal is None:
        return WholeChain(tokens[:, :depth], proposal)
    support = proposal.support
    support = support if support is None or support.dim() == 1 else support[:, :depth]
    return WholeChain(tokens[:, :depth], Proposal(proposal.probs[:, :depth], proposal.choices[:, : depth + 1], support))


def _cut_tree(tree: DraftTree, depth: int) -> DraftTree:
    """Of no more than `depth` levels. Nodes below stay, so that forwards keep their shape, and count as that deep.

    Of equally deep nodes on a path acceptance keeps the first, and positions behind a text's end may not exist.
    """
    if depth >= tree.max_depth:
        return tree
    return replace(tree, depths=tree.depths.clamp(max=depth), max_depth=depth)
