"""The drafter's compiled steps over one session: what it reads after a round, a draft step, whole chains and trees.

See `draft_graphs` for what they compute, and `round_graphs` for the graph that does several of these at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..cache.graph_sizes import NODE_BUCKET, step_width
from ..drafter.propose import DraftChoice, grow_tree
from ..drafter.session import DraftSession, DraftState
from ..trees.draft_tree import DraftTree, to_target_ids
from ..trees.host_numbers import on_device
from ..trees.shape import DraftShape
from .draft_graphs import (
    ChosenBy,
    DraftedChain,
    GraphSampling,
    GrownTree,
    StepOutput,
    absorb_step,
    chain_step,
    draft_step,
    tree_step,
)
from .graph_makers import GraphKey, Step
from .graphs import Graphs
from .inputs import GraphInputs

MOST_PIECES = 3
"""In which a graph reads what the drafter has missed: behind other graphs so many are quicker than one eager pass."""


class CompiledDrafting:
    """A session's steps as graphs where shapes allow, else the session's own. Drafts are proposed with it as with one.

    Args:
        session: drafts, and keeps what was read.
        graphs: the pair's.
    """

    def __init__(self, session: DraftSession, graphs: Graphs):
        self.session, self.graphs = session, graphs
        self.drafter, self.draft_ids = session.drafter, session.draft_ids
        self.inputs = GraphInputs(session.cache)

    @property
    def root(self) -> DraftState:
        return self.session.root

    def if_rows_pay(self, make: Callable[[], Step]) -> Callable[[], Step] | None:
        """`make`, unless a graph for so many rows would not pay."""
        return make if self.inputs.rows_pay else None

    def absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> None:
        """As `DraftSession.absorb`, compiled unless that is unusually much."""
        self.session.absorb(tokens, aux, counts, read=self.read)

    def catch_up(self) -> None:
        """As `DraftSession.catch_up`, compiled unless that is much."""
        few = self.session.num_unread <= MOST_PIECES * NODE_BUCKET
        self.session.catch_up(read=self.read, at_once=NODE_BUCKET if few else None)

    def read(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> DraftState:
        """As `DraftSession.read`."""
        rows, size = tokens.shape
        eager = partial(self.session.read, tokens, aux, rotary, counts)
        self.session.cache.place(size)
        if size > NODE_BUCKET or not self.session.has_root or not self.inputs.make_room(NODE_BUCKET):
            return eager()
        output = self.graphs.run_or_eager(
            GraphKey("absorb", rows, NODE_BUCKET, (self.inputs.num_slots,)),
            self.if_rows_pay(partial(absorb_step, self.drafter)),
            lambda: self._read_inputs(tokens, aux, rotary, counts),
            lambda: _output(eager()),
        )
        return _state(output)

    def _read_inputs(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> tuple:
        inputs, rows = self.inputs, len(tokens)
        last = on_device([max(count - 1, 0) for count in counts], self.session.device)
        return (
            inputs.fill("tokens", tokens, (rows, NODE_BUCKET)),
            inputs.fill("aux", aux, (rows, NODE_BUCKET, aux.shape[-1])),
            inputs.slots(NODE_BUCKET),
            inputs.fill_rotary(rotary, NODE_BUCKET),
            inputs.fill("last", last),
            inputs.fixed,
        )

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        """As `DraftSession.step`."""
        rows, size = tokens.shape
        width = step_width(size)
        eager = partial(self.session.step, tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        self.session.cache.place(size, after=after)
        if not self.inputs.make_room(after + width):
            return eager()
        mask = self._mask(ancestors, (rows, 1, width, self.inputs.num_slots))
        output = self.graphs.run_or_eager(
            GraphKey("step", rows, width, (self.inputs.num_slots, mask is not None)),
            self.if_rows_pay(partial(draft_step, self.drafter, single=width == 1)),
            lambda: (
                self.inputs.fill("tokens", tokens, (rows, width)),
                self.inputs.fill("feedback", feedback, (rows, width, feedback.shape[-1])),
                self.inputs.slots(width, after=after),
                self.inputs.fill_rotary(self.session.rotary_at(depth), 1),
                mask,
                self.inputs.fixed,
            ),
            lambda: _output(eager()),
        )
        return DraftState(output.logits[:, :size], output.feedback[:, :size], output.next_token)

    def _mask(self, ancestors: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """`None` for a chain, whose mask the graph makes itself."""
        mask = None if ancestors is None else self.session.cache.attention_mask(ancestors, dtype=self.session.dtype)
        return None if mask is None else self.inputs.fill_mask("mask", mask, shape)  # type: ignore[arg-type]

    # --- whole drafts --------------------------------------------------------------------------------------------

    def chain(self, roots: Tensor, depth: int, sampling: GraphSampling, by: ChosenBy) -> DraftedChain | None:
        """A chain of `depth` tokens in one graph; `None` where there is none.

        Args:
            roots: `(B,)` the last token of each row.
            sampling: how tokens are chosen.
            by: what they are chosen by, of the next `depth` positions.
        """
        rows, root = self.session.cache.batch_size, self.root
        self.session.cache.place(1)
        if not self.inputs.make_room(depth):
            return None

        def inputs() -> tuple:
            fill = self.inputs.fill
            return (
                fill("root", root.logits),
                fill("feedback", root.feedback),
                self.inputs.slots(depth),
                fill("roots", roots),
                self.inputs.fill_rotary(self.session.rotary_depths(depth), depth),
                by.through(fill),
                self.inputs.fixed,
            )

        def first_probs() -> Tensor:
            scores, _ = sampling.choice(by).rank(root.logits[:, 0], (), self.draft_ids, depth=0)
            return scores[:, None].softmax(-1, dtype=torch.float32)

        return self.graphs.run_or_eager(
            GraphKey("chain", rows, depth, (self.inputs.num_slots,), sampling.key),
            self.if_rows_pay(partial(chain_step, self.drafter, depth, sampling)),
            inputs,
            lambda: None,
            reference=first_probs,
        )

    def tree(
        self, roots: Tensor, shape: DraftShape, depth: int, sampling: GraphSampling, by: ChosenBy
    ) -> DraftTree | None:
        """A dynamic tree of `depth` levels in one graph; `None` where there is none.

        Args:
            roots: as in `chain`.
            shape: of the tree, where a text's end does not cut it.
            depth: levels.
            sampling, by: as in `chain`.
        """
        rows, nodes = self.session.cache.batch_size, shape.top_k * (depth - 1)  # that are stepped over
        if self.graphs.disabled_reason or not nodes:
            return None
        if depth < shape.depth:  # the last of a text, not worth a graph
            choice = sampling.choice(by)
            return grow_tree(self.root, self.session.step, self.draft_ids, roots, shape.cut_to(depth), choice)
        self.session.cache.place(1)
        if not self.inputs.make_room(nodes):
            return None
        root, fill = self.root, self.inputs.fill
        grown: GrownTree | None = self.graphs.run_or_eager(
            GraphKey("tree", rows, shape.nodes, (depth, shape.top_k, self.inputs.num_slots), sampling.key),
            self.if_rows_pay(partial(tree_step, self.drafter, shape, sampling)),
            lambda: (
                fill("root", root.logits),
                fill("feedback", root.feedback),
                self.inputs.slots(nodes),
                fill("roots", roots),
                self.inputs.fill_rotary(self.session.rotary_depths(depth - 1), depth - 1),
                by.through(fill),
                self.inputs.fixed,
            ),
            lambda: None,
            reference=partial(_logits_of_first_level, self.session, shape.top_k, sampling.choice(by)),
        )
        return None if grown is None else grown.to_tree(shape)


def _output(state: DraftState) -> StepOutput:
    return StepOutput(state.logits, state.feedback, state.known)


def _state(output: StepOutput) -> DraftState:
    return DraftState(output.logits, output.feedback, output.next_token)


def _logits_of_first_level(session: DraftSession, top_k: int, choice: DraftChoice) -> Tensor:
    """What a tree's graph is checked by: logits `(B, top_k, Vd)` of the root's children."""
    logits = session.root.logits[:, 0]
    scores, _ = choice.rank(logits, (), session.draft_ids, depth=0, at_least=logits.shape[-1])
    children = scores.float().topk(top_k).indices  # (B, top_k)
    alone = torch.eye(top_k, dtype=torch.bool, device=children.device).expand(len(children), -1, -1)
    feedback = session.root.feedback.expand(-1, top_k, -1)
    tokens = to_target_ids(children, session.draft_ids)
    return session.step(tokens, feedback, after=0, depth=0, ancestors=alone).logits
