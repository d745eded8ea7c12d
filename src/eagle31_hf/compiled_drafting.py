"""The drafter's compiled steps: what it reads after a round, a draft step, and a whole chain of fixed length.

See `acceleration` for what is compiled when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .acceleration import NODE_BUCKET, SLOT_BUCKET, PlacedSteps, slot_bucket
from .cache.fixed_shape import FixedShapeCache
from .compiled_steps import CompiledSteps, Step
from .drafter import Eagle31Drafter
from .drafting import Belief, DraftSession, DraftState, WholeChain
from .processing import DraftWarping
from .sampling import draw, uniform_numbers


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
        inputs = self._chain_inputs(depth, deepest, sample=sample)
        if not known:
            chain = _DraftChain(self.drafter, deepest, sample=sample, warping=warping)
            expected = chain.belief(self.root.logits[:, 0])[:, None] if sample else None
            self.steps.add(shape, chain.as_step(), inputs, expected)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        probs, tokens, draft_ids = outputs
        return WholeChain(tokens[:, :depth], draft_ids[:, :depth], probs[:, :depth] if sample else None)

    def _chain_inputs(self, depth: int, deepest: int, *, sample: bool) -> tuple:
        fill, root = self.placed.inputs.fill, self.root
        self._rotary_at(deepest)
        assert self._rotary is not None, "just made"
        cos, sin = (table[:, :deepest] for table in self._rotary)  # (B, deepest, d)
        self.placed.point_at(0, deepest)
        numbers = None
        if sample:  # as many as a chain of this depth drawn step by step takes, in the same order
            drawn = [uniform_numbers((root.logits.shape[0], 1), self.device) for _ in range(depth)]
            numbers = fill("numbers", torch.stack(drawn, 1), (len(drawn[0]), deepest, 1))
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
            mask = _causal_mask(cache, feedback.dtype)
        out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, cache)
        return drafter.draft_logits(out.normed), out.feedback

    return draft


def _causal_mask(cache: FixedShapeCache, dtype: torch.dtype) -> Tensor:
    """Additive `(B, 1, T, S)`: a row sees its slots up to the one it writes."""
    slots = cache.block.slots  # (B, T)
    columns = torch.arange(cache.layers[0].keys.shape[2], device=slots.device)
    hidden = columns > slots[:, None, :, None]  # (B, 1, T, S)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min)


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
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, _causal_mask(cache, hidden.dtype), cache)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
        return logits, out.feedback[rows, last][:, None], *Belief.of(logits[:, 0])

    return absorb


class _DraftChain:
    """A whole chain of draft steps.

    Args:
        depth: tokens.
        sample: draw them.
        warping: the target's processors, if tokens are drawn.
    """

    def __init__(self, drafter: Eagle31Drafter, depth: int, *, sample: bool, warping: DraftWarping | None):
        self.drafter, self.depth, self.sample, self.warping = drafter, depth, sample, warping

    def belief(self, logits: Tensor) -> Tensor:
        """What is drawn from, `(B, Vd)` float32."""
        return (logits.float() if self.warping is None else self.warping(logits)).softmax(-1)

    def as_step(self) -> Step:
        """What each token was drawn from `(B, depth, Vd)` (of a greedy chain, nothing), target ids, draft ids."""
        depth, sample, belief = self.depth, self.sample, self.belief
        ids, draft = self.drafter.draft_ids, _draft_step(self.drafter)

        def chain(
            root: Tensor, feedback: Tensor, rotary: tuple[Tensor, Tensor], numbers: Tensor, cache: FixedShapeCache
        ) -> tuple[Tensor, ...]:
            slots, logits = cache.block.slots, root
            beliefs, choices, tokens = [], [], []
            for k in range(depth):
                if sample:
                    beliefs.append(belief(logits[:, -1]))
                    choices.append(draw(beliefs[-1], uniform=numbers[:, k]))
                else:
                    choices.append(logits[:, -1].argmax(-1))
                tokens.append(choices[-1] if ids is None else ids[choices[-1]])
                if k + 1 < depth:
                    here = slice(k, k + 1)
                    cache.block.slots = slots[:, here]
                    cos, sin = (table[:, here] for table in rotary)
                    logits, feedback = draft(tokens[-1][:, None], feedback, (cos, sin), None, cache)
            cache.block.slots = slots
            probs = torch.stack(beliefs, 1) if sample else logits.new_zeros(0)
            return probs, torch.stack(tokens, 1), torch.stack(choices, 1)

        return chain
