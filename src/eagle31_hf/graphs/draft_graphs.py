"""The drafter's graphs: a step, what is read after a round, a whole chain, a whole tree; and a session that uses them.

Steps take a `FixedShapeCache` and the slots they write in it, and give NamedTuples of tensors (`graphs.Graphs`). See
`round_graphs` for the graph that does several of these at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.graph_sizes import NODE_BUCKET
from ..drafter.drafter import Eagle31Drafter
from ..drafter.dynamic import grow_tree
from ..drafter.propose import DraftChoice, draft_chain
from ..drafter.session import DraftSession, DraftState
from ..drafting.draft_tree import DraftTree
from ..drafting.host_numbers import on_device
from ..drafting.shape import DraftShape
from ..sampling.draw import argmax, choose, likeliest
from ..sampling.logits_processing import DraftWarping
from .fixed_cache import FixedShapeCache, GraphInputs, padded
from .graphs import Graphs
from .steps import GraphKey

Rotary = tuple[Tensor, Tensor]  # cosines and sines (B, T, d)


class DraftNodes(NamedTuple):
    """A draft as graphs take and give it: of a tree what `DraftTree` has, of a chain tokens `(B, N)` alone."""

    tokens: Tensor
    parents: Tensor | None = None
    depths: Tensor | None = None
    ancestors: Tensor | None = None

    @classmethod
    def of(cls, tree: DraftTree, shape: DraftShape) -> DraftNodes:
        """To be accepted."""
        return cls(tree.tokens, tree.parents, tree.depths, tree.ancestors) if shape.is_tree else cls(tree.tokens)

    def to_tree(self, shape: DraftShape, depth: int | None = None) -> DraftTree:
        """Made for this shape, of no more than `depth` levels."""
        if self.parents is None:
            return DraftTree.chain(self.tokens if depth is None else self.tokens[:, : depth + 1])
        most = self.tokens.shape[1] - 1
        tree = DraftTree(*self, max_depth=min(shape.depth, most), is_chain=most <= 1)  # type: ignore[arg-type]
        return tree if depth is None else tree.cut_to(depth)


class Drafted(NamedTuple):
    """A draft, and by what its graph is checked: the logits `(B, k, Vd)` of its first step; of a chain of one token,
    for which there is no step, those it was chosen by."""

    checked: Tensor
    nodes: DraftNodes


def draft_step(
    drafter: Eagle31Drafter,
    tokens: Tensor,
    feedback: Tensor,
    slots: Tensor,
    rotary: Rotary,
    ancestors: Tensor | None,
    cache: FixedShapeCache,
) -> DraftState:
    """Of `T` positions of one depth, which see what `FixedShapeCache.masks` says."""
    mask = cache.at(slots).masks(feedback.dtype, ancestors)
    out = drafter.decode(drafter.embed(tokens), feedback, rotary, mask, cache)
    return DraftState(drafter.draft_logits(out.normed), out.feedback)


def rotary_of(drafter: Eagle31Drafter, slots: Tensor, count: int, tables: Rotary | None) -> Rotary:
    """Rotations `(B, count, d)` of positions from the first of the slots `(B, T)` on, which are positions, too; or the
    `tables` of a drafter that must be told them."""
    if tables is not None:
        return tables
    return drafter.rotary(slots[:, :1] + torch.arange(count, device=slots.device))


def absorb_step(
    drafter: Eagle31Drafter,
    tokens: Tensor,
    aux: Tensor,
    slots: Tensor,
    rotary: Rotary,
    last: Tensor,
    cache: FixedShapeCache,
) -> DraftState:
    """What `DraftSession.read` computes, of positions padded to one number."""
    hidden = drafter.fuse_aux(aux)
    mask = cache.at(slots).masks(hidden.dtype)
    out = drafter.decode(drafter.embed(tokens), hidden, rotary, mask, cache)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    logits = drafter.draft_logits(out.normed[rows, last][:, None])  # (B, 1, Vd)
    return DraftState(logits, out.feedback[rows, last][:, None])


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
        """Equal for graphs that choose alike."""
        key = self.draws, () if self.warping is None else self.warping.key
        return (*key, "checked") if self.checks and not self.draws else key

    def of_target(self, logits: Tensor, by: ChosenBy) -> Tensor:
        """The target's token after each node, `(B, N)`, by its logits, noise and what was seen there `(B, N, V)`."""
        if self.warping is not None and (self.warping.key or self.draws):
            logits = self.warping.of_nodes(logits, by.seen)
        if by.noise is not None:
            return choose(logits, by.noise)
        return likeliest(logits) if self.checks else argmax(logits)

    def of_drafts(self, by: ChosenBy) -> DraftChoice:
        """Of draft tokens. Of a greedy draft processors that look at scores alone change nothing."""
        warping = self.warping
        if warping is not None and not (warping.key and (self.draws or warping.needs_seen)):
            warping = None
        return DraftChoice(warping, *by)


class DraftInputs(NamedTuple):
    """What a whole draft starts from.

    Attributes:
        root: the drafter's state behind each row's last token.
        slots: `(B, S)` that the draft writes.
        roots: `(B,)` the last token of each row.
        rotary: of its levels; `None`: made from the slots.
        by: what tokens are chosen by.
    """

    root: DraftState
    slots: Tensor
    roots: Tensor
    rotary: Rotary | None
    by: ChosenBy


class DraftInGraph:
    """Steps within a step: a whole draft is then made as by eager code.

    Attributes:
        checked: see `Drafted`.
    """

    def __init__(self, drafter: Eagle31Drafter, told: DraftInputs, levels: int, cache: FixedShapeCache):
        self.drafter, self.checked = drafter, told.root.logits
        self._slots, self._cache = told.slots, cache
        self._cos, self._sin = rotary_of(drafter, told.slots, levels, told.rotary)

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        """As `DraftSession.step`."""
        slots, here = self._slots[:, after : after + tokens.shape[1]], slice(depth, depth + 1)
        rotary = self._cos[:, here], self._sin[:, here]
        state = draft_step(self.drafter, tokens, feedback, slots, rotary, ancestors, self._cache)
        if depth == 0:
            self.checked = state.logits
        return state


def whole_step(
    drafter: Eagle31Drafter, shape: DraftShape, choosing: GraphChoice, told: DraftInputs, cache: FixedShapeCache
) -> Drafted:
    """A whole draft of this shape. The last token of a chain is not stepped over, though it has a slot."""
    steps, choice = DraftInGraph(drafter, told, shape.stepped_levels, cache), choosing.of_drafts(told.by)
    made_of = told.root, steps.step, drafter.draft_ids, told.roots, shape, choice
    nodes = DraftNodes.of(grow_tree(*made_of), shape) if shape.is_tree else DraftNodes(draft_chain(*made_of))
    return Drafted(steps.checked, nodes)


# --- a session by graphs ----------------------------------------------------------------------------------------------


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

    def absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> None:
        """As `DraftSession.absorb`, compiled unless that is unusually much."""
        self.session.absorb(tokens, aux, counts, read=self.read)

    def catch_up(self) -> None:
        """As `DraftSession.catch_up`, compiled unless that is much."""
        self.session.catch_up(read=self.read)

    def read(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> DraftState:
        """As `DraftSession.read`."""
        rows, size = tokens.shape
        eager = partial(self.session.read, tokens, aux, rotary, counts)
        self.session.cache.place(size)
        if size > NODE_BUCKET or not self.session.has_root or not self.inputs.make_room(NODE_BUCKET):
            return eager()
        state: DraftState = self.graphs.run_or_eager(
            GraphKey("absorb", rows, NODE_BUCKET, (self.inputs.num_slots,)),
            partial(absorb_step, self.drafter),
            lambda: (
                padded(tokens, NODE_BUCKET),
                padded(aux, NODE_BUCKET, aux.shape[-1]),
                self.inputs.slots(NODE_BUCKET),
                tuple(padded(table, NODE_BUCKET, table.shape[-1]) for table in rotary),
                on_device([max(count - 1, 0) for count in counts], self.session.device),
                self.inputs.fixed,
            ),
            eager,
            pays=self.inputs.rows_pay,
        )
        return state

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        """As `DraftSession.step`, compiled for chains: trees are made whole."""
        eager = partial(self.session.step, tokens, feedback, after=after, depth=depth, ancestors=ancestors)
        self.session.cache.place(tokens.shape[1], after=after)
        if ancestors is not None or not self.inputs.make_room(after + 1):
            return eager()
        slots, rotary = partial(self.inputs.slots, 1, after=after), partial(self.session.rotary_at, depth)
        state: DraftState = self.graphs.run_or_eager(
            GraphKey("step", len(tokens), 1, (self.inputs.num_slots,)),
            partial(draft_step, self.drafter),
            lambda: (tokens, feedback, slots(), rotary(), None, self.inputs.fixed),
            eager,
            pays=self.inputs.rows_pay,
        )
        return state

    def rotary(self, count: int) -> Rotary | None:
        """Tables of the next positions for a graph that cannot make them itself."""
        return self.session.rotary_ahead(count) if self.session.rotates_by_length else None

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
        if self.graphs.disabled_reason or (shape.is_tree and shape.depth < 2):
            return None
        self.session.cache.place(1)
        if not self.inputs.make_room(shape.top_k * levels):
            return None
        kind, size = ("tree", shape.nodes) if shape.is_tree else ("chain", shape.depth)
        key_shape = shape.depth, shape.top_k, self.inputs.num_slots
        drafted: Drafted | None = self.graphs.run_or_eager(
            GraphKey(kind, len(roots), size, key_shape, choosing.key),
            partial(whole_step, self.drafter, shape, choosing),
            lambda: (
                DraftInputs(root, self.inputs.slots(shape.top_k * levels), roots, self.rotary(levels), by),
                self.inputs.fixed,
            ),
            lambda: None,
            pays=self.inputs.rows_pay,
        )
        return None if drafted is None else drafted.nodes.to_tree(shape, depth)
