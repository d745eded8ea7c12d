"""A round's end in one graph: accept drafts, read what was accepted into the drafter, draft again.

The three depend on each other and not on the host, which looks once, after them. So a compiled round is two graphs, the
target's verification and this one. It is for drafts of fixed size, chains and dynamic trees, and for processors that
look at scores alone or at which tokens the text has; any other end of a round is several calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from ..drafter.session import DraftState
from ..drafting.draft_tree import DraftTree
from ..drafting.shape import DraftShape
from ..sampling.acceptance import Acceptance, accept_chosen, for_host, match_prefix
from ..sampling.seen_tokens import seen_after, seen_at_nodes
from ..targets.binding import TargetOutput
from .draft_graphs import (
    ChosenBy,
    CompiledDrafting,
    DraftInputs,
    DraftNodes,
    GraphChoice,
    Rotary,
    absorb_step,
    rotary_of,
    whole_step,
)
from .fixed_cache import FixedShapeCache
from .steps import GraphKey


class AcceptedAhead(NamedTuple):
    """A round's end, and the next draft made ahead: nothing of it is committed, and none of it has to be used.

    Attributes:
        state: the drafter's after each row's bonus.
        for_host: what the host reads of the acceptance (`acceptance.for_host`).
        draft: behind the bonus.
        shape: of the draft.
    """

    state: DraftState
    for_host: Tensor
    draft: DraftNodes
    shape: DraftShape


class RoundStep:
    """What one graph computes: from one verified draft to the next. It outlives generations, so it holds no cache.

    Attributes:
        width: nodes of the longest path, root included: `W`.
        levels: depths it needs rotary tables for.
        draft_slots: slots that drafting writes behind the bonus.
        looks_ahead: positions whose noise it takes of a sampled text: of all it may accept and of the draft behind.
    """

    def __init__(self, drafter: Eagle31Drafter, shape: DraftShape, choosing: GraphChoice):
        self.drafter, self.shape, self.choosing = drafter, shape, choosing
        self.width, self.levels = min(shape.depth, shape.nodes - 1) + 1, shape.stepped_levels
        self.draft_slots, self.looks_ahead = shape.top_k * self.levels, self.width + shape.depth

    def __call__(
        self,
        verified: TargetOutput,
        drafts: DraftNodes,
        slots: Tensor,
        rotary: Rotary | None,
        by: ChosenBy,
        cache: FixedShapeCache,
    ) -> AcceptedAhead:
        """The step.

        Args:
            verified: all nodes.
            drafts: to be accepted.
            slots: `(B, W + draft_slots)`, from the first node over all that may be accepted to the end of the draft
                behind.
            rotary: tables `(B, W + levels, d)` of as many positions as are deep; `None`: made from the slots.
            by: what tokens are chosen by.
        """
        width, turned = self.width, rotary_of(self.drafter, slots, self.width + self.levels, rotary)
        logits, aux = verified
        assert aux is not None, "the drafter reads it"
        acceptance, path = self.accept(logits, drafts, by)
        last, readable = acceptance.length - 1, self.readable(acceptance, logits.shape[-1])
        cos, sin = (table[:, :width] for table in turned)
        read = absorb_step(
            self.drafter,
            self.following(path, readable),
            self.along(aux, readable),
            slots[:, :width],
            (cos, sin),
            last,
            cache,
        )
        rows = torch.arange(len(last), device=last.device)[:, None]
        behind = last[:, None] + torch.arange(1, 1 + self.draft_slots, device=last.device)
        cos, sin = (table[rows, behind[:, : self.levels]] for table in turned)
        chosen_by = self._chosen_behind(by, path, readable)
        told = DraftInputs(read, slots[rows, behind], readable.bonus, (cos, sin), chosen_by)
        nodes = whole_step(self.drafter, self.shape, self.choosing, told, cache).nodes
        host = for_host(acceptance, path, read.logits[:, 0, :1].isnan().any())
        return AcceptedAhead(read, host, nodes, self.shape)

    def accept(self, logits: Tensor, drafts: DraftNodes, by: ChosenBy) -> tuple[Acceptance, Tensor]:
        """By the target's logits `(B, N, V)`; also tokens `(B, W)` of the accepted path, root first."""
        tokens, (noise, seen) = drafts.tokens, by
        if self.shape.is_tree:
            tree = drafts.to_tree(self.shape)
            if noise is not None:
                noise = noise[torch.arange(len(tokens), device=tokens.device)[:, None], tree.depths]  # (B, N, V)
            if seen is not None:
                seen = seen_at_nodes(seen, tokens, tree.ancestors)
            acceptance = accept_chosen(tree, self.choosing.of_target(logits, ChosenBy(noise, seen)))
            return acceptance, tokens.gather(1, acceptance.path)
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        if noise is not None:
            noise = noise[:, : self.width]  # in a chain, node = depth
        if seen is not None:
            seen = seen_at_nodes(seen, tokens, nodes[:, None] <= nodes[:, :, None])
        best, bonus = match_prefix(tokens, self.choosing.of_target(logits, ChosenBy(noise, seen)))
        return Acceptance(nodes, best + 1, bonus), tokens

    def readable(self, acceptance: Acceptance, vocabulary: int) -> Acceptance:
        """For the drafter, which knows no token `V`: whoever gets that one fails."""
        gives_none = self.choosing.draws or self.choosing.checks
        return acceptance._replace(bonus=acceptance.bonus.clamp(max=vocabulary - 1)) if gives_none else acceptance

    def following(self, path: Tensor, acceptance: Acceptance) -> Tensor:
        """The token after each accepted one, `(B, W)`; behind the last one they mean nothing."""
        places = torch.arange(1, 1 + path.shape[1], device=path.device)
        return torch.where(places == acceptance.length[:, None], acceptance.bonus[:, None], path.roll(-1, 1))

    def along(self, aux: Tensor, acceptance: Acceptance) -> Tensor:
        """Hidden states `(B, W, A*Ht)` of the path, of all nodes' `(B, N, A*Ht)`."""
        return acceptance.along(aux) if self.shape.is_tree else aux

    def _chosen_behind(self, by: ChosenBy, path: Tensor, acceptance: Acceptance) -> ChosenBy:
        """What the next draft is chosen by, behind the bonus."""
        noise, seen = by
        if noise is not None:  # the first token behind the bonus is as many positions on as were accepted
            length = acceptance.length[:, None]
            ahead = length + torch.arange(self.shape.depth, device=length.device)
            noise = noise[torch.arange(len(length), device=length.device)[:, None], ahead]
        if seen is not None:
            seen = seen_after(seen, path, acceptance.length, acceptance.bonus)
        return ChosenBy(noise, seen)

    # --- its use by a generation ---------------------------------------------------------------------------------

    @staticmethod
    def serves(shape: DraftShape) -> bool:
        """Whether drafts of this shape always have one size, and more than one level if they are trees."""
        if shape.is_tree:
            return shape.depth > 1
        return shape.min_confidence == 0 and shape.depth > 0

    def advance(
        self, drafting: CompiledDrafting, tree: DraftTree, verified: TargetOutput, by: ChosenBy
    ) -> AcceptedAhead | None:
        """What the target accepts of a round's drafts, and what was drafted after it; `None` where no graph can say.

        Args:
            drafting: the drafter's compiled steps.
            tree: the drafts.
            verified: all nodes.
            by: what tokens are chosen by, of the next `looks_ahead` positions.
        """
        session, inputs, shape = drafting.session, drafting.inputs, self.shape
        if drafting.graphs.disabled_reason or tree.size != shape.nodes or tree.max_depth + 1 != self.width:
            return None
        session.cache.place(self.width)
        if not inputs.make_room(self.width + self.draft_slots):
            return None
        assert verified.aux is not None, "the drafter reads it"
        verified = verified._replace(aux=verified.aux.to(device=session.device, dtype=session.dtype))
        by, nodes = by.to(session.device), DraftNodes.of(tree, shape)

        def filled() -> tuple:
            slots, rotary = inputs.slots(self.width + self.draft_slots), drafting.rotary(self.width + self.levels)
            return verified, nodes, slots, rotary, by, inputs.fixed

        key_shape = shape.depth, shape.top_k, inputs.num_slots
        made: AcceptedAhead | None = drafting.graphs.run_or_eager(
            GraphKey("advance", len(tree.tokens), tree.size, key_shape, self.choosing.key),
            self,
            filled,
            lambda: None,
            pays=inputs.rows_pay,
        )
        return made
