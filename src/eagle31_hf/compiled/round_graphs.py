"""A round's end in one graph: accept drafts, read what was accepted into the drafter, draft again.

The three depend on each other and not on the host, which looks once, after them. So a compiled round is two graphs, the
target's verification and this one. It is for drafts of fixed size, chains and dynamic trees, and for processors that
look at scores alone or at which tokens the text has; any other end of a round is several calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..drafter.session import DraftState
from ..sampling.acceptance import Acceptance, accept_chosen, for_host, match_prefix
from ..sampling.draw import argmax, choose
from ..sampling.logits_processing import DraftWarping
from ..sampling.seen_tokens import seen_after, seen_at_nodes
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape
from .draft_graphs import (
    ChosenBy,
    DraftedChain,
    GraphSampling,
    GrownTree,
    Rotary,
    absorb_step,
    chain_step,
    tree_step,
)
from .draft_session import CompiledDrafting
from .fixed_cache import FixedShapeCache
from .graph_makers import GraphKey, Step


@dataclass(frozen=True)
class NextDraft:
    """What a round's graph has done ahead: nothing of it is committed, and none of it has to be used.

    Attributes:
        state: of the drafter after each row's bonus.
        rotary: tables `(B, T, d)` from the lengths before on.
        width: positions that were read.
        shape: of the draft.
        draft: what was drafted behind the bonus.
    """

    state: DraftState
    rotary: Rotary
    width: int
    shape: DraftShape
    draft: DraftedChain | GrownTree

    def to_tree(self, depth: int) -> DraftTree:
        """The draft, of no more than `depth` levels."""
        if isinstance(self.draft, DraftedChain):
            return self.draft.to_tree(depth)
        return self.draft.to_tree(self.shape).cut_to(depth)


class RoundOutput(NamedTuple):
    """What a round's graph gives: the drafter's logits and feedback after the bonus, what was accepted, a new draft,
    and what the host reads of all that (`acceptance.for_host`)."""

    logits: Tensor
    feedback: Tensor
    acceptance: Acceptance
    draft: DraftedChain | GrownTree
    for_host: Tensor


class GraphAcceptance(NamedTuple):
    """What is accepted, inside a graph.

    Attributes:
        acceptance: of the drafts.
        tokens: `(B, W)` of the accepted path, root first; behind the last accepted one they mean nothing.
        is_chain: the path's nodes follow one another.
    """

    acceptance: Acceptance
    tokens: Tensor
    is_chain: bool

    @property
    def last(self) -> Tensor:
        """`(B,)` the place of the last accepted token in the path."""
        return self.acceptance.length - 1

    def following(self) -> Tensor:
        """The token after each accepted one, `(B, W)`."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        bonus = self.acceptance.bonus[:, None]
        return torch.where(places == self.last[:, None], bonus, self.tokens.roll(-1, 1))

    def along(self, aux: Tensor) -> Tensor:
        """Hidden states `(B, W, A*Ht)` of the path, of all nodes' `(B, N, A*Ht)`."""
        return aux if self.is_chain else self.acceptance.along(aux)


# --- what one graph computes ------------------------------------------------------------------------------------------


class AcceptAndDraft(ABC):
    """From one verified draft to the next. It outlives generations, so it holds no cache.

    Attributes:
        width: nodes of the longest path, root included: `W`.
        draft_slots: slots that drafting writes behind the bonus.
        levels: depths it needs rotary tables for.
        looks_ahead: positions whose noise it needs of a sampled text: of all it may accept and of the draft behind.
    """

    width: int
    draft_slots: int
    levels: int

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        self.drafter, self.shape, self.sample, self.warping = drafter, shape, sample, warping
        self.sampling = GraphSampling.of(sample=sample, warping=warping)

    @property
    def looks_ahead(self) -> int:
        return self.width + self.shape.depth

    @property
    @abstractmethod
    def key_shape(self) -> tuple[int, ...]:
        """What tells its graph from others of as many nodes."""

    @abstractmethod
    def accept(self, logits: Tensor, drafts: Any, by: ChosenBy) -> GraphAcceptance:
        """By the target's logits `(B, N, V)`; `drafts` as `inputs` gives them, noise of the next positions."""

    @abstractmethod
    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, by: ChosenBy, cache: Any
    ) -> DraftedChain | GrownTree:
        """Draft behind the bonus `(B,)`, from the drafter's state after it, by noise of the positions behind it."""

    @abstractmethod
    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> Any:
        """What `accept` takes of a draft."""

    def make(self) -> Step:
        """The step to compile.

        Its slots `(B, W + draft_slots)` reach from the first node over all that may be accepted to the end of the draft
        behind it, and the rotary tables `(B, W + levels, d)` as far as that is deep.
        """
        width, absorb = self.width, absorb_step(self.drafter)

        def advance(
            logits: Tensor,
            drafts: Any,
            aux: Tensor,
            slots: Tensor,
            rotary: Rotary,
            by: ChosenBy,
            cache: FixedShapeCache,
        ) -> RoundOutput:
            accepted = self.accept(logits, drafts, by)
            last, bonus = accepted.last, accepted.acceptance.bonus
            cos, sin = (table[:, :width] for table in rotary)
            read = absorb(accepted.following(), accepted.along(aux), slots[:, :width], (cos, sin), last, cache)
            rows = torch.arange(len(last), device=last.device)[:, None]
            behind = last[:, None] + torch.arange(1, 1 + self.draft_slots, device=last.device)
            cos, sin = (table[rows, behind[:, : self.levels]] for table in rotary)
            root = DraftState(read.logits, read.feedback)
            following = self.chosen_behind(by, accepted)
            draft = self.draft(root, bonus, slots[rows, behind], (cos, sin), following, cache)
            tokens = drafts if isinstance(drafts, Tensor) else drafts.tokens
            told = for_host(accepted.acceptance, tokens, read.logits[:, 0, :1].isnan().any())
            return RoundOutput(read.logits, read.feedback, accepted.acceptance, draft, told)

        return advance

    def chosen_behind(self, by: ChosenBy, accepted: GraphAcceptance) -> ChosenBy:
        """What the next draft is chosen by, behind the bonus."""
        last, (noise, seen) = accepted.last, by
        if noise is not None:  # the first token behind the bonus is as many positions on as were accepted
            ahead = last[:, None] + torch.arange(1, 1 + self.shape.depth, device=last.device)
            noise = noise[torch.arange(len(last), device=last.device)[:, None], ahead]
        if seen is not None:
            seen = seen_after(seen, accepted.tokens, accepted.acceptance.length, accepted.acceptance.bonus)
        return ChosenBy(noise, seen)

    def target_choice(self, logits: Tensor, at_nodes: ChosenBy) -> Tensor:
        """The target's token after each node, `(B, N)`, by noise `(B, N, V)` of its position if it is sampled, and by
        the tokens of the text through it `(B, N, V)`."""
        noise, seen = at_nodes
        if not self.warping.key and noise is None:
            return argmax(logits)
        scores = self.warping.of_nodes(logits, seen)
        return argmax(scores) if noise is None else choose(scores, noise)


class ChainAcceptAndDraft(AcceptAndDraft):
    """From one chain of fixed length to the next."""

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        super().__init__(drafter, shape, sample=sample, warping=warping)
        self.width, self.draft_slots, self.levels = shape.depth + 1, shape.depth, shape.depth
        self._chain = chain_step(drafter, shape.depth, self.sampling)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return ()

    def accept(self, logits: Tensor, drafts: Tensor, by: ChosenBy) -> GraphAcceptance:
        nodes = torch.arange(drafts.shape[1], device=drafts.device).expand(len(drafts), -1)
        noise, seen = by
        if noise is not None:
            noise = noise[:, : self.width]  # in a chain, node = depth
        if seen is not None:
            seen = seen_at_nodes(seen, drafts, nodes[:, None] <= nodes[:, :, None])
        best, bonus = match_prefix(drafts, self.target_choice(logits, ChosenBy(noise, seen)))
        return GraphAcceptance(Acceptance(nodes, best + 1, bonus, best), drafts, is_chain=True)

    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, by: ChosenBy, cache: Any
    ) -> DraftedChain:
        return self._chain(root.logits, root.feedback, slots, bonus, rotary, by, cache)

    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Tokens `(B, K+1)`, root first."""
        return fill("drafts", tree.tokens)


class TreeDrafts(NamedTuple):
    """A tree to accept."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor


class TreeAcceptAndDraft(AcceptAndDraft):
    """From one dynamic tree to the next, grown as `grow_tree` does."""

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        super().__init__(drafter, shape, sample=sample, warping=warping)
        self.longest, self.children = min(shape.depth, shape.nodes - 1), min(shape.top_k, shape.nodes - 1)
        self.width, self.levels = self.longest + 1, shape.depth - 1
        self.draft_slots = shape.top_k * self.levels
        self._tree = tree_step(drafter, shape, self.sampling)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self.shape.depth, self.shape.top_k

    def accept(self, logits: Tensor, drafts: TreeDrafts, by: ChosenBy) -> GraphAcceptance:
        tokens, parents, depths, ancestors = drafts
        noise, seen = by
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth=self.longest, max_children=self.children)
        if noise is not None:
            noise = noise[torch.arange(len(tokens), device=tokens.device)[:, None], depths]  # (B, N, V)
        if seen is not None:
            seen = seen_at_nodes(seen, tokens, ancestors)
        acceptance = accept_chosen(tree, self.target_choice(logits, ChosenBy(noise, seen)))
        return GraphAcceptance(acceptance, tokens.gather(1, acceptance.path), is_chain=False)

    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, by: ChosenBy, cache: Any
    ) -> GrownTree:
        return self._tree(root.logits, root.feedback, slots, bonus, rotary, by, cache)

    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> TreeDrafts:
        return TreeDrafts(
            fill("drafts", tree.tokens),
            fill("parents", tree.parents),
            fill("depths", tree.depths),
            fill("ancestors", tree.ancestors),
        )


class AcceptedAhead(NamedTuple):
    """What a round's graph says of its drafts: what was accepted, what the host reads of that, and the next draft."""

    acceptance: Acceptance
    for_host: Tensor
    draft: NextDraft


# --- the graph in a round ---------------------------------------------------------------------------------------------


class RoundGraph:
    """One generation's use of such a graph, for drafts of one shape.

    Args:
        drafting: the drafter's compiled steps.
        shape: of the drafts it accepts and makes; a chain without doubt, or a dynamic tree.
        sample: whether tokens are drawn.
        warping: the target's processors.
    """

    def __init__(self, drafting: CompiledDrafting, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        kind = TreeAcceptAndDraft if shape.is_tree else ChainAcceptAndDraft
        self.step = kind(drafting.drafter, shape, sample=sample, warping=warping)
        self.drafting, self.shape = drafting, shape
        self.sampling_key = (sample, warping.key)

    @property
    def looks_ahead(self) -> int:
        """Positions whose noise it takes of a text that is sampled."""
        return self.step.looks_ahead

    @staticmethod
    def serves(shape: DraftShape) -> bool:
        """Whether drafts of this shape always have one size, and more than one level if they are trees."""
        if shape.is_tree:
            return shape.depth > 1
        return shape.min_confidence == 0 and shape.depth > 0

    def __call__(self, tree: DraftTree, logits: Tensor, aux: Tensor, by: ChosenBy) -> AcceptedAhead | None:
        """What the target accepts of a round's drafts, and what was drafted after it; `None` where no graph can say.

        Args:
            tree: the drafts.
            logits: the target's `(B, N, V)`.
            aux: its hidden states `(B, N, A*Ht)`.
            by: what tokens are chosen by, of the next `looks_ahead` positions.
        """
        step, drafting = self.step, self.drafting
        session, graph_inputs, rows = drafting.session, drafting.inputs, len(tree.tokens)
        if drafting.graphs.disabled_reason or tree.size != self.shape.nodes or tree.max_depth + 1 != step.width:
            return None
        session.cache.place(step.width)
        if not graph_inputs.make_room(step.width + step.draft_slots):
            return None
        rotary = session.rotary_ahead(step.width + step.levels)
        aux = aux.to(device=session.device, dtype=session.dtype)
        by = by.through(lambda _name, tensor: tensor.to(session.device))

        def inputs() -> tuple:
            return (
                graph_inputs.fill("target logits", logits),
                step.inputs(tree, graph_inputs.fill),
                graph_inputs.fill("aux", aux),
                graph_inputs.slots(step.width + step.draft_slots),
                graph_inputs.fill_rotary(rotary, step.width + step.levels),
                by.through(graph_inputs.fill),
                graph_inputs.fixed,
            )

        output: RoundOutput | None = drafting.graphs.run_or_eager(
            GraphKey("advance", rows, tree.size, (*step.key_shape, graph_inputs.num_slots), self.sampling_key),
            drafting.if_rows_pay(step.make),
            inputs,
            lambda: None,
            reference=lambda: self._logits_after_bonus(tree, logits, aux, rotary, by),
        )
        if output is None:
            return None
        state = DraftState(output.logits, output.feedback)
        draft = NextDraft(state, rotary, step.width, self.shape, output.draft)
        return AcceptedAhead(output.acceptance, output.for_host, draft)

    def _logits_after_bonus(self, tree: DraftTree, logits: Tensor, aux: Tensor, rotary: Rotary, by: ChosenBy) -> Tensor:
        """The drafter's logits after the bonus as eager code has them, by which the graph is checked."""
        drafts: Any = self.step.inputs(tree, lambda _name, tensor: tensor)
        accepted = self.step.accept(logits, drafts, by)
        cos, sin = (table[:, : self.step.width] for table in rotary)
        counts = accepted.acceptance.length.tolist()
        read = self.drafting.session.read(accepted.following(), accepted.along(aux), (cos, sin), counts)
        return read.logits
