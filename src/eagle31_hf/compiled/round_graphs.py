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

from ..drafter.draft_state import DraftState
from ..drafter.drafter import Eagle31Drafter
from ..sampling.acceptance import Acceptance, accept_chosen, for_host, match_prefix
from ..sampling.seen_tokens import seen_after, seen_at_nodes
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape
from .draft_graphs import (
    ChosenBy,
    DraftedChain,
    DraftInputs,
    GraphChoice,
    GrownTree,
    Rotary,
    absorb_step,
    rotary_of,
    whole_step,
)
from .draft_session import CompiledDrafting
from .fixed_cache import FixedShapeCache
from .graph_makers import GraphKey, Step


@dataclass(frozen=True)
class NextDraft:
    """What a round's graph has done ahead: nothing of it is committed, and none of it has to be used.

    Attributes:
        state: of the drafter after each row's bonus.
        width: positions that were read.
        shape: of the draft.
        draft: what was drafted behind the bonus.
    """

    state: DraftState
    width: int
    shape: DraftShape
    draft: DraftedChain | GrownTree

    def to_tree(self, depth: int) -> DraftTree:
        """The draft, of no more than `depth` levels."""
        return self.draft.to_tree(self.shape, depth)


class RoundInputs(NamedTuple):
    """What a round's end starts from.

    Attributes:
        logits, aux: the target's `(B, N, V)` and `(B, N, A*Ht)` of all nodes.
        drafts: as `AcceptAndDraft.inputs` gives them.
        slots: of all that may be accepted and of the draft behind it.
        rotary: of as many positions; `None`: made from the slots.
        by: what tokens are chosen by.
    """

    logits: Tensor
    drafts: Any
    aux: Tensor
    slots: Tensor
    rotary: Rotary | None
    by: ChosenBy


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

    def to_read(self, vocabulary: int) -> GraphAcceptance:
        """The same for the drafter to read, which knows no token `V`: whoever gets that one fails."""
        bonus = self.acceptance.bonus.clamp(max=vocabulary - 1)
        return self._replace(acceptance=self.acceptance._replace(bonus=bonus))

    def along(self, aux: Tensor) -> Tensor:
        """Hidden states `(B, W, A*Ht)` of the path, of all nodes' `(B, N, A*Ht)`."""
        return aux if self.is_chain else self.acceptance.along(aux)


# --- what one graph computes ------------------------------------------------------------------------------------------


class AcceptAndDraft(ABC):
    """From one verified draft to the next. It outlives generations, so it holds no cache.

    Attributes:
        width: nodes of the longest path, root included: `W`.
        levels: depths it needs rotary tables for.
        draft_slots: slots that drafting writes behind the bonus.
        looks_ahead: positions whose noise it needs of a sampled text: of all it may accept and of the draft behind.
    """

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, choosing: GraphChoice):
        self.drafter, self.shape, self.choosing = drafter, shape, choosing
        self.width, self.levels = min(shape.depth, shape.nodes - 1) + 1, shape.stepped_levels
        self.draft_slots = shape.top_k * self.levels
        self._draft = whole_step(drafter, shape, choosing)

    @property
    def looks_ahead(self) -> int:
        return self.width + self.shape.depth

    @property
    def key_shape(self) -> tuple[int, ...]:
        """What tells its graph from others of as many nodes."""
        return (self.shape.depth, self.shape.top_k) if self.shape.is_tree else ()

    @abstractmethod
    def accept(self, logits: Tensor, drafts: Any, by: ChosenBy) -> GraphAcceptance:
        """By the target's logits `(B, N, V)`; `drafts` as `inputs` gives them, noise of the next positions."""

    @abstractmethod
    def inputs(self, tree: DraftTree, fill: Callable[[str, Tensor], Tensor]) -> Any:
        """What `accept` takes of a draft."""

    def make(self) -> Step:
        """The step to compile.

        Its slots `(B, W + draft_slots)` reach from the first node over all that may be accepted to the end of the draft
        behind it, and the rotary tables `(B, W + levels, d)` as far as that is deep.
        """
        width, absorb = self.width, absorb_step(self.drafter)

        def advance(verified: RoundInputs, cache: FixedShapeCache) -> RoundOutput:
            logits, drafts, aux, slots, rotary, by = verified
            turned = rotary_of(self.drafter, slots, width + self.levels, rotary)
            acceptance, accepted = self.judge(logits, drafts, by)
            last, bonus = accepted.last, accepted.acceptance.bonus
            cos, sin = (table[:, :width] for table in turned)
            read = absorb(accepted.following(), accepted.along(aux), slots[:, :width], (cos, sin), last, cache)
            rows = torch.arange(len(last), device=last.device)[:, None]
            behind = last[:, None] + torch.arange(1, 1 + self.draft_slots, device=last.device)
            cos, sin = (table[rows, behind[:, : self.levels]] for table in turned)
            following = self.chosen_behind(by, accepted)
            next_draft = DraftInputs(read.logits, read.feedback, slots[rows, behind], bonus, (cos, sin), following)
            draft = self._draft(next_draft, cache)
            tokens = drafts if isinstance(drafts, Tensor) else drafts.tokens
            told = for_host(acceptance, tokens, read.logits[:, 0, :1].isnan().any())
            return RoundOutput(read.logits, read.feedback, acceptance, draft, told)

        return advance

    def judge(self, logits: Tensor, drafts: Any, by: ChosenBy) -> tuple[Acceptance, GraphAcceptance]:
        """What the target accepts, and the same for the drafter to read."""
        accepted, gives_none = self.accept(logits, drafts, by), self.choosing.draws or self.choosing.checks
        return accepted.acceptance, accepted.to_read(logits.shape[-1]) if gives_none else accepted

    def chosen_behind(self, by: ChosenBy, accepted: GraphAcceptance) -> ChosenBy:
        """What the next draft is chosen by, behind the bonus."""
        last, (noise, seen) = accepted.last, by
        if noise is not None:  # the first token behind the bonus is as many positions on as were accepted
            ahead = last[:, None] + torch.arange(1, 1 + self.shape.depth, device=last.device)
            noise = noise[torch.arange(len(last), device=last.device)[:, None], ahead]
        if seen is not None:
            seen = seen_after(seen, accepted.tokens, accepted.acceptance.length, accepted.acceptance.bonus)
        return ChosenBy(noise, seen)


class ChainAcceptAndDraft(AcceptAndDraft):
    """From one chain of fixed length to the next."""

    def accept(self, logits: Tensor, drafts: Tensor, by: ChosenBy) -> GraphAcceptance:
        nodes = torch.arange(drafts.shape[1], device=drafts.device).expand(len(drafts), -1)
        noise, seen = by
        if noise is not None:
            noise = noise[:, : self.width]  # in a chain, node = depth
        if seen is not None:
            seen = seen_at_nodes(seen, drafts, nodes[:, None] <= nodes[:, :, None])
        best, bonus = match_prefix(drafts, self.choosing.of_target(logits, ChosenBy(noise, seen)))
        return GraphAcceptance(Acceptance(nodes, best + 1, bonus, best), drafts, is_chain=True)

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

    def accept(self, logits: Tensor, drafts: TreeDrafts, by: ChosenBy) -> GraphAcceptance:
        tokens, parents, depths, ancestors = drafts
        noise, seen = by
        children = min(self.shape.top_k, self.shape.nodes - 1)
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth=self.width - 1, max_children=children)
        if noise is not None:
            noise = noise[torch.arange(len(tokens), device=tokens.device)[:, None], depths]  # (B, N, V)
        if seen is not None:
            seen = seen_at_nodes(seen, tokens, ancestors)
        acceptance = accept_chosen(tree, self.choosing.of_target(logits, ChosenBy(noise, seen)))
        return GraphAcceptance(acceptance, tokens.gather(1, acceptance.path), is_chain=False)

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
        choosing: how tokens are chosen.
    """

    def __init__(self, drafting: CompiledDrafting, shape: DraftShape, choosing: GraphChoice):
        kind = TreeAcceptAndDraft if shape.is_tree else ChainAcceptAndDraft
        self.step = kind(drafting.drafter, shape, choosing)
        self.drafting, self.shape = drafting, shape

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
        aux = aux.to(device=session.device, dtype=session.dtype)
        by = by.through(lambda _name, tensor: tensor.to(session.device))

        def inputs() -> tuple:
            verified = RoundInputs(
                graph_inputs.fill("target logits", logits),
                step.inputs(tree, graph_inputs.fill),
                graph_inputs.fill("aux", aux),
                graph_inputs.slots(step.width + step.draft_slots),
                drafting.rotary(step.width + step.levels),
                by.through(graph_inputs.fill),
            )
            return verified, graph_inputs.fixed

        output: RoundOutput | None = drafting.graphs.run_or_eager(
            GraphKey("advance", rows, tree.size, (*step.key_shape, graph_inputs.num_slots), step.choosing.key),
            drafting.if_rows_pay(step.make),
            inputs,
            lambda: None,
            reference=lambda: self._logits_after_bonus(tree, logits, aux, by),
        )
        if output is None:
            return None
        state = DraftState(output.logits, output.feedback)
        draft = NextDraft(state, step.width, self.shape, output.draft)
        return AcceptedAhead(output.acceptance, output.for_host, draft)

    def _logits_after_bonus(self, tree: DraftTree, logits: Tensor, aux: Tensor, by: ChosenBy) -> Tensor:
        """The drafter's logits after the bonus as eager code has them, by which the graph is checked."""
        drafts: Any = self.step.inputs(tree, lambda _name, tensor: tensor)
        _, accepted = self.step.judge(logits, drafts, by)
        rotary = self.drafting.session.rotary_depths(self.step.width)
        counts = accepted.acceptance.length.tolist()
        read = self.drafting.session.read(accepted.following(), accepted.along(aux), rotary, counts)
        return read.logits
