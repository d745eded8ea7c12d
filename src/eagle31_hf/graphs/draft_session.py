"""The drafter's compiled steps over one session: what it reads after a round, a draft step, whole chains and trees.

See `draft_graphs` for what they compute, and `round_graphs` for the graph that does several of these at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cache.graph_sizes import NODE_BUCKET, step_width
from ..drafter.propose import DraftChoice, grow_tree
from ..drafter.session import DraftSession, DraftState
from ..drafting.draft_tree import DraftTree, to_target_ids
from ..drafting.host_numbers import on_device
from ..drafting.shape import DraftShape
from .draft_graphs import ChosenBy, Drafted, DraftInputs, GraphChoice, Rotary, absorb_step, draft_step, whole_step
from .graphs import Graphs
from .inputs import GraphInputs
from .steps import GraphKey, Step

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
        kind = str(session.drafter.rotary_emb.rope_type)
        self._asks_length = "dynamic" in kind or kind == "longrope"  # which a graph would have to ask the device

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
        state: DraftState = self.graphs.run_or_eager(
            GraphKey("absorb", rows, NODE_BUCKET, (self.inputs.num_slots,)),
            self.if_rows_pay(partial(absorb_step, self.drafter)),
            lambda: (
                self.inputs.fill("tokens", tokens, (rows, NODE_BUCKET)),
                self.inputs.fill("aux", aux, (rows, NODE_BUCKET, aux.shape[-1])),
                self.inputs.slots(NODE_BUCKET),
                self.inputs.fill_rotary(rotary, NODE_BUCKET),
                on_device([max(count - 1, 0) for count in counts], self.session.device),
                self.inputs.fixed,
            ),
            eager,
        )
        return state

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
        mask: Any = None  # of a chain, whose mask the graph makes itself
        if ancestors is not None:
            mask = self.session.cache.attention_mask(ancestors, dtype=self.session.dtype)
        if mask is not None:
            mask = self.inputs.fill_mask("mask", mask, (rows, 1, width, self.inputs.num_slots))
        output = self.graphs.run_or_eager(
            GraphKey("step", rows, width, (self.inputs.num_slots, mask is not None)),
            self.if_rows_pay(partial(draft_step, self.drafter)),
            lambda: (
                self.inputs.fill("tokens", tokens, (rows, width)),
                self.inputs.fill("feedback", feedback, (rows, width, feedback.shape[-1])),
                self.inputs.slots(width, after=after),
                self.inputs.fill_rotary(self.session.rotary_at(depth), 1),
                mask,
                self.inputs.fixed,
            ),
            eager,
        )
        return DraftState(output.logits[:, :size], output.feedback[:, :size])

    def rotary(self, count: int) -> Rotary | None:
        """Tables of the next positions for a graph that cannot make them itself."""
        return self.inputs.fill_rotary(self.session.rotary_depths(count), count) if self._asks_length else None

    # --- whole drafts --------------------------------------------------------------------------------------------

    def whole(
        self, roots: Tensor, shape: DraftShape, depth: int, choosing: GraphChoice, by: ChosenBy
    ) -> DraftTree | None:
        """A chain or a dynamic tree in one graph; `None` where there is none.

        Args:
            roots: `(B,)` the last token of each row.
            shape: of the draft, where a text's end does not cut it.
            depth: levels that are wanted.
            choosing: how tokens are chosen.
            by: what they are chosen by, of the next `shape.depth` positions.
        """
        root, levels = self.root, shape.stepped_levels
        if shape.is_tree and (self.graphs.disabled_reason or depth < 2):
            return None
        if shape.is_tree and depth < shape.depth:  # the last of a text, not worth a graph
            choice = choosing.of_drafts(by)
            return grow_tree(root, self.session.step, self.draft_ids, roots, shape.cut_to(depth), choice)
        self.session.cache.place(1)
        if not self.inputs.make_room(shape.top_k * levels):
            return None
        key = GraphKey("chain", len(roots), shape.depth, (self.inputs.num_slots,), choosing.draft_key)
        if shape.is_tree:
            key = key._replace(kind="tree", size=shape.nodes, shape=(shape.depth, shape.top_k, *key.shape))
        drafted: Drafted | None = self.graphs.run_or_eager(
            key,
            self.if_rows_pay(partial(whole_step, self.drafter, shape, choosing)),
            lambda: (
                DraftInputs(
                    *root,
                    self.inputs.slots(shape.top_k * levels),
                    roots,
                    self.rotary(levels),
                    by,
                ),
                self.inputs.fixed,
            ),
            lambda: None,
            reference=partial(_first_of_draft, self.session, shape, choosing.of_drafts(by)),
        )
        return None if drafted is None else drafted.nodes.to_tree(shape, depth)


def _first_of_draft(session: DraftSession, shape: DraftShape, choice: DraftChoice) -> Tensor:
    """What a draft's graph is checked by: the distribution `(B, 1, S)` that a chain's first token is chosen by; of a
    tree logits `(B, top_k, Vd)` of the root's children."""
    logits, top_k = session.root.logits[:, 0], shape.top_k
    scores, _ = choice.rank(logits, (), session.draft_ids, depth=0, at_least=logits.shape[-1] if shape.is_tree else 1)
    if not shape.is_tree:
        return scores[:, None].softmax(-1, dtype=torch.float32)
    children = scores.float().topk(top_k).indices  # (B, top_k)
    alone = torch.eye(top_k, dtype=torch.bool, device=children.device).expand(len(children), -1, -1)
    feedback = session.root.feedback.expand(-1, top_k, -1)
    tokens = to_target_ids(children, session.draft_ids)
    return session.step(tokens, feedback, after=0, depth=0, ancestors=alone).logits
