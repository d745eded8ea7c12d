"""A round's end in one graph: accept drafts, read what was accepted into the drafter, draft again.

The three depend on each other and not on the host, which looks once, after them. So a compiled round is two graphs, the
target's verification and this one. It is for drafts of fixed size, chains and dynamic trees, and for processors that
look at scores alone; any other end of a round is several calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import chain_numbers
from ..drafter.session import DraftState
from ..sampling.acceptance import Acceptance, accept_greedy, match_prefix
from ..sampling.draw import argmax, draw, uniform_numbers
from ..sampling.logits_processing import DraftWarping
from ..sampling.rejection import block_accept_mask, rejection_numbers
from ..trees.draft_tree import DraftTree, Proposal
from ..trees.shape import DraftShape
from .draft_graphs import ChainSampling, DraftedChain, GrownTree, Rotary, absorb_step, chain_step, tree_step
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

    def to_tree(self, roots: Tensor, depth: int, draft_ids: Tensor | None) -> DraftTree:
        """The draft, of no more than `depth` levels."""
        if isinstance(self.draft, DraftedChain):
            return self.draft.to_tree(roots, depth, draft_ids)
        return self.draft.to_tree(self.shape).cut_to(depth)


class RoundOutput(NamedTuple):
    """What a round's graph gives: the drafter's logits and feedback after the bonus, what was accepted, a new draft."""

    logits: Tensor
    feedback: Tensor
    acceptance: Acceptance
    draft: DraftedChain | GrownTree


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
    """

    width: int
    draft_slots: int
    levels: int

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        self.drafter, self.shape, self.sample, self.warping = drafter, shape, sample, warping

    @property
    @abstractmethod
    def key_shape(self) -> tuple[int, ...]:
        """What tells its graph from others of as many nodes."""

    @abstractmethod
    def accept(self, logits: Tensor, drafts: Any) -> GraphAcceptance:
        """By the target's logits `(B, N, V)`; `drafts` as `inputs` gives them."""

    @abstractmethod
    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, numbers: Tensor | None, cache: Any
    ) -> DraftedChain | GrownTree:
        """Draft behind the bonus `(B,)`, from the drafter's state after it."""

    @abstractmethod
    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> Any:
        """What `accept` takes of a draft, random numbers included."""

    @abstractmethod
    def next_numbers(self, logits: Tensor) -> Tensor | None:
        """Random numbers for the next draft, by the drafter's logits `(B, 1, Vd)` for their number."""

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
            numbers: Tensor | None,
            cache: FixedShapeCache,
        ) -> RoundOutput:
            accepted = self.accept(logits, drafts)
            last, bonus = accepted.last, accepted.acceptance.bonus
            cos, sin = (table[:, :width] for table in rotary)
            read = absorb(accepted.following(), accepted.along(aux), slots[:, :width], (cos, sin), last, cache)
            rows = torch.arange(len(last), device=last.device)[:, None]
            behind = last[:, None] + torch.arange(1, 1 + self.draft_slots, device=last.device)
            cos, sin = (table[rows, behind[:, : self.levels]] for table in rotary)
            root = DraftState(read.logits, read.feedback)
            draft = self.draft(root, bonus, slots[rows, behind], (cos, sin), numbers, cache)
            return RoundOutput(read.logits, read.feedback, accepted.acceptance, draft)

        return advance

    def target_choice(self, logits: Tensor, numbers: Tensor | None) -> Tensor:
        """The target's token after each node, `(B, N)`, drawn if there are numbers to draw by."""
        if numbers is not None:
            return draw(self.warping.probs(logits), numbers=numbers)
        return argmax(self.warping(logits.flatten(0, 1))).view(logits.shape[:2])


class ChainDrafts(NamedTuple):
    """A chain to accept: tokens `(B, K+1)`, root first; if it was drawn, its `Proposal` and `rejection_numbers`."""

    tokens: Tensor
    probs: Tensor | None = None
    choices: Tensor | None = None
    support: Tensor | None = None
    draft_numbers: Tensor | None = None
    bonus_number: Tensor | None = None


class ChainAcceptAndDraft(AcceptAndDraft):
    """From one chain of fixed length to the next: drawn ones are accepted by rejection."""

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        super().__init__(drafter, shape, sample=sample, warping=warping)
        self.width, self.draft_slots, self.levels = shape.depth + 1, shape.depth, shape.depth
        self._chain = chain_step(drafter, shape.depth, ChainSampling(sample, warping if sample else None))

    @property
    def key_shape(self) -> tuple[int, ...]:
        return ()

    def accept(self, logits: Tensor, drafts: ChainDrafts) -> GraphAcceptance:
        tokens = drafts.tokens
        if self.sample:
            assert drafts.probs is not None
            assert drafts.choices is not None
            assert drafts.draft_numbers is not None
            assert drafts.bonus_number is not None
            proposal = Proposal(drafts.probs, drafts.choices, drafts.support)
            numbers = drafts.draft_numbers, drafts.bonus_number
            best, bonus = block_accept_mask(tokens, proposal, self.warping.probs(logits), *numbers)
        else:
            best, bonus = match_prefix(tokens, self.target_choice(logits, None))
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        return GraphAcceptance(Acceptance(nodes, best + 1, bonus, best), tokens, is_chain=True)

    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, numbers: Tensor | None, cache: Any
    ) -> DraftedChain:
        return self._chain(root.logits, root.feedback, slots, rotary, numbers, cache)

    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> ChainDrafts:
        tokens, proposal = fill("drafts", tree.tokens), tree.proposal
        if not self.sample:
            return ChainDrafts(tokens)
        assert proposal is not None, "rejection sampling needs the distribution the drafts were drawn from"
        draft_numbers, bonus_number = rejection_numbers(tree)  # before the next draft's, as without a graph
        return ChainDrafts(
            tokens,
            fill("probs", proposal.probs),
            fill("choices", proposal.choices),
            None if proposal.support is None else fill("support", proposal.support),
            fill("draft numbers", draft_numbers),
            fill("bonus number", bonus_number),
        )

    def next_numbers(self, logits: Tensor) -> Tensor | None:
        return chain_numbers(logits, self.shape.depth, self.warping) if self.sample else None


class TreeDrafts(NamedTuple):
    """A tree to accept, and numbers `(B, N, 1)` to draw the target's token at every node by; `None`: it is greedy."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    numbers: Tensor | None


class TreeAcceptAndDraft(AcceptAndDraft):
    """From one dynamic tree to the next, grown as `grow_tree` does."""

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        super().__init__(drafter, shape, sample=sample, warping=warping)
        self.longest, self.children = min(shape.depth, shape.nodes - 1), min(shape.top_k, shape.nodes - 1)
        self.width, self.levels = self.longest + 1, shape.depth - 1
        self.draft_slots = shape.top_k * self.levels
        self._tree = tree_step(drafter, shape)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self.shape.depth, self.shape.top_k

    def accept(self, logits: Tensor, drafts: TreeDrafts) -> GraphAcceptance:
        tokens, parents, depths, ancestors, numbers = drafts
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth=self.longest, max_children=self.children)
        acceptance = accept_greedy(tree, self.target_choice(logits, numbers))
        return GraphAcceptance(acceptance, tokens.gather(1, acceptance.path), is_chain=False)

    def draft(
        self, root: DraftState, bonus: Tensor, slots: Tensor, rotary: Rotary, numbers: Tensor | None, cache: Any
    ) -> GrownTree:
        return self._tree(root.logits, root.feedback, slots, bonus, rotary, cache)

    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> TreeDrafts:
        numbers = uniform_numbers((*tree.tokens.shape, 1), tree.tokens.device) if self.sample else None
        return TreeDrafts(
            fill("drafts", tree.tokens),
            fill("parents", tree.parents),
            fill("depths", tree.depths),
            fill("ancestors", tree.ancestors),
            None if numbers is None else fill("tree numbers", numbers),
        )

    def next_numbers(self, logits: Tensor) -> None:
        return None


# --- the graph in a round ---------------------------------------------------------------------------------------------


class RoundGraph:
    """One generation's use of such a graph, for drafts of one shape.

    Args:
        drafting: the drafter's compiled steps.
        shape: of the drafts it accepts and makes; a chain without doubt, or a dynamic tree.
        sample: whether tokens are drawn.
        warping: the target's processors, which look at scores alone.
    """

    def __init__(self, drafting: CompiledDrafting, shape: DraftShape, *, sample: bool, warping: DraftWarping):
        kind = TreeAcceptAndDraft if shape.is_dynamic_tree else ChainAcceptAndDraft
        self.step = kind(drafting.drafter, shape, sample=sample, warping=warping)
        self.drafting, self.shape = drafting, shape
        self.sampling_key = (sample, warping.key)

    @staticmethod
    def serves(shape: DraftShape) -> bool:
        """Whether drafts of this shape always have one size, and more than one level if they are trees."""
        if shape.is_dynamic_tree:
            return shape.depth > 1
        return shape.static is None and shape.min_confidence == 0 and shape.depth > 0

    def __call__(self, tree: DraftTree, logits: Tensor, aux: Tensor) -> tuple[Acceptance, NextDraft] | None:
        """What the target accepts of a round's drafts, and what was drafted after it; `None` where no graph can say.

        Args:
            tree: the drafts.
            logits: the target's `(B, N, V)`.
            aux: its hidden states `(B, N, A*Ht)`.
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
        drafts: list[Any] = []  # made once: random numbers are among them

        def inputs() -> tuple:
            drafts.append(step.inputs(tree, graph_inputs.fill))
            numbers = step.next_numbers(session.root.logits)
            return (
                graph_inputs.fill("target logits", logits),
                drafts[0],
                graph_inputs.fill("aux", aux),
                graph_inputs.slots(step.width + step.draft_slots),
                graph_inputs.fill_rotary(rotary, step.width + step.levels),
                None if numbers is None else graph_inputs.fill("numbers", numbers),
                graph_inputs.fixed,
            )

        output: RoundOutput | None = drafting.graphs.run_or_eager(
            GraphKey("advance", rows, tree.size, (*step.key_shape, graph_inputs.num_slots), self.sampling_key),
            drafting.if_first_rows(step.make),
            inputs,
            lambda: None,
            reference=lambda: self._logits_after_bonus(step.accept(logits, drafts[0]), aux, rotary),
        )
        if output is None:
            return None
        state = DraftState(output.logits, output.feedback)
        return output.acceptance, NextDraft(state, rotary, step.width, self.shape, output.draft)

    def _logits_after_bonus(self, accepted: GraphAcceptance, aux: Tensor, rotary: Rotary) -> Tensor:
        """The drafter's logits after the bonus as eager code has them, by which the graph is checked."""
        cos, sin = (table[:, : self.step.width] for table in rotary)
        counts = accepted.acceptance.length.tolist()
        read = self.drafting.session.read(accepted.following(), accepted.along(aux), (cos, sin), counts)
        return read.logits
