"""The drafter's compiled steps: what it reads after a round, a draft step, whole chains and trees.

A round of a chain of fixed length is two graphs: the target's verification, and `advance`, which judges the chain,
reads what was accepted and drafts the next one before the host has looked. See `acceleration` for what is compiled
when, and `draft_graphs` for what graphs compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .acceleration import NODE_BUCKET, SLOT_BUCKET, PlacedSteps, slot_bucket
from .compiled_steps import CompiledSteps
from .draft_graphs import ChainAdvance, DraftChain, absorb_step, believing, draft_step, following, tree_step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftSession, DraftState, WholeChain
from .processing import DraftWarping
from .proposing import chain_numbers, grow_tree
from .sampling import Acceptance, chain_acceptance, rejection_numbers
from .tree import DraftTree, Proposal


@dataclass(frozen=True)
class Ahead:
    """What a round's last graph has done already: nothing of it is committed, and none of it has to be used.

    Attributes:
        state: of the drafter after each row's bonus.
        rotary: tables `(B, T, d)` from the lengths before on.
        width: positions that were read.
        chain: drafted behind the bonus.
    """

    state: DraftState
    rotary: tuple[Tensor, Tensor]
    width: int
    chain: WholeChain


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
        self._ahead: Ahead | None = None

    def draft_at_once(
        self, depth: int, draws: int, *, sample: bool, warping: DraftWarping | None = None
    ) -> WholeChain | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return _cut(ahead.chain, depth)
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
        return _cut(_whole_chain(outputs, self.draft_ids), depth)

    def advance(
        self, tree: DraftTree, logits: Tensor, aux: Tensor | None, *, draws: int, sample: bool, warping: DraftWarping
    ) -> Acceptance | None:
        """Judge a whole chain, read what follows from it and draft the next one; `None` where no graph can.

        To be asked in every round: `absorb` then only commits what was read, and the next `draft_at_once` hands out
        the chain, unless rows leave or are rolled back, which forgets both.

        Args:
            tree: a chain.
            draws: tokens of a chain that no text's end cuts short.
            logits: the target's `(B, K+1, V)`.
            aux: its hidden states `(B, K+1, A*Ht)`.
            sample: whether chains are drawn, and judged by rejection.
            warping: the target's processors, which look at scores alone.
        """
        self._ahead = None
        rows, size = tree.tokens.shape
        if self.steps.why_not or aux is None or not draws or size != draws + 1:
            return None
        self.cache.place(size)
        if not self.placed.make_room(size + draws):
            return None
        (slots,) = self.cache.mask_widths.values()
        way = (sample, warping.key)
        shape = ("advance", rows, size, slots, way)
        known = self.steps.has(shape)
        if not known and (rows != self.first_rows or not self.steps.takes("advance", way)):
            return None
        rotary = self._rotary_ahead(2 * size)
        drawn = self._drawn_inputs(tree, warping) if sample else ((), (), None)
        inputs = self._advance_inputs(tree, logits, aux, rotary, drawn)
        if not known:
            advance = ChainAdvance(self.drafter, draws, sample=sample, warping=warping)
            best, bonus = advance.judge(logits, tree.tokens, *drawn[:2])
            cos, sin = (table[:, :size] for table in rotary)
            aux = aux.to(device=self.device, dtype=self.dtype)
            read = super().read(following(tree.tokens, best, bonus), aux, (cos, sin), (best + 1).tolist())
            self.steps.add(shape, advance.as_step(), inputs, read.logits)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        root, feedback, best, bonus, *chain = outputs
        self._ahead = Ahead(DraftState(root, feedback), rotary, size, _whole_chain(tuple(chain), self.draft_ids))
        return chain_acceptance(tree, best, bonus)

    def _advance_inputs(
        self, tree: DraftTree, logits: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], drawn: tuple
    ) -> tuple:
        fill, columns = self.placed.inputs.fill, 2 * tree.size - 1
        cos, sin = (table[:, :columns] for table in rotary)
        aux = aux.to(device=self.device, dtype=self.dtype)
        self.placed.point_at(0, columns)
        return (
            fill("judged logits", logits, tuple(logits.shape)),
            fill("judged", tree.tokens, tuple(tree.tokens.shape)),
            *drawn,
            fill("aux ahead", aux, tuple(aux.shape)),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            self.placed.fixed,
        )

    def _drawn_inputs(self, tree: DraftTree, warping: DraftWarping) -> tuple:
        """Of a sampled chain: what it was drawn from, and random numbers to judge it by and to draw the next with."""
        fill, proposal = self.placed.inputs.fill, tree.proposal
        assert proposal is not None, "rejection sampling needs the distribution the drafts were drawn from"
        support = proposal.support
        judge_numbers = rejection_numbers(tree)  # first, as when judging and drafting are apart
        draft_numbers = chain_numbers(self.root.logits, tree.size - 1, warping)
        return (
            (
                fill("probs", proposal.probs, tuple(proposal.probs.shape)),
                fill("choices", proposal.choices, tuple(proposal.choices.shape)),
                None if support is None else fill("support", support, tuple(support.shape)),
            ),
            tuple(fill(f"judge {n.shape[1]}", n, tuple(n.shape)) for n in judge_numbers),
            fill("numbers", draft_numbers, tuple(draft_numbers.shape)),
        )

    def absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> None:
        ahead = self._ahead
        if ahead is None:
            super().absorb(tokens, aux, counts)
        else:
            self._commit(ahead.state, ahead.rotary, counts, ahead.width)

    def rollback(self, lengths: Sequence[int]) -> None:
        self._ahead = None
        super().rollback(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._ahead = None
        super().select_rows(rows)

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
            self.steps.add(shape, tree_step(self.drafter, depth, top_k=top_k, size=size), inputs, first)
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


def _whole_chain(outputs: tuple[Tensor, ...], reduced: Tensor | None) -> WholeChain:
    """What `DraftChain.as_step` gave."""
    if len(outputs) == 1:
        return WholeChain(outputs[0], None)
    probs, tokens, choices, *own = outputs
    return WholeChain(tokens, Proposal(probs, choices, own[0] if own else reduced))


def _cut(chain: WholeChain, depth: int) -> WholeChain:
    """Its first `depth` tokens."""
    tokens, proposal = chain
    if depth == tokens.shape[1] or proposal is None:
        return WholeChain(tokens[:, :depth], proposal)
    support = proposal.support
    support = support if support is None or support.dim() == 1 else support[:, :depth]
    return WholeChain(tokens[:, :depth], Proposal(proposal.probs[:, :depth], proposal.choices[:, : depth + 1], support))
