"""A round by graphs of fixed shape: the target's verification, and one that accepts, reads and drafts again.

With chains of fixed length and trees a round is these two, sampled or not. A chain that doubt may end takes a graph per
draft step; what has no graph is eager code (`EagerRound`). Nothing made ahead is committed
before the host has seen where the text ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..compiled.draft_graphs import ChosenBy, GraphChoice
from ..compiled.draft_session import CompiledDrafting
from ..compiled.round_graphs import AcceptedAhead, RoundGraph
from ..compiled.verify import CompiledVerification
from ..drafter.assistant import Assistant
from ..drafter.session import absorbed
from ..stats import PhaseClock
from ..target.binding import TargetOutput
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape
from .choosing import ChoiceRule, Choosing, only_one
from .eager_round import EagerRound, propose
from .pair import current_graphs, last_graphs, maker_at_hand
from .pair_caches import PairCaches
from .round import Accepted, RoundBatch, Written

MOST_ROUND_GRAPHS = 64
"""Shapes and ways to choose that are remembered; what is recorded for them is `Graphs`' business."""

LIVE_SHARE = 0.25
"""Share of a compiled batch that must need tokens for the others to stay in it; measured on a small pair only."""


class CompiledRound(EagerRound):
    """Rounds by graphs, where they can be had. Without a drafter these are the target's verification alone.

    Over caches of 8 bits, which compiled code cannot read, the target stays eager.
    """

    def __init__(self, drafter: Assistant, caches: PairCaches, choosing: Choosing, clock: PhaseClock):
        super().__init__(drafter, caches, choosing, clock)
        maker = choosing.graph_maker or maker_at_hand(self.drafter)
        were_seen = choosing.graph_maker is not None and maker.weights_seen
        self.graphs = (last_graphs(drafter) if were_seen else current_graphs(drafter)).made_by(maker)
        session = caches.drafter
        self.drafting = None if session is None else CompiledDrafting(session, self.graphs)
        self.verification: CompiledVerification | None = None
        if choosing.stats.cache_type == "full":
            most = choosing.shape.nodes
            self.verification = CompiledVerification(self.binding, caches.target, self.graphs, most_nodes=most)
        else:
            self.choosing.stats.fall_back("verification is not compiled over a cache in 8 bits")
        self._round_graphs: dict[Hashable, RoundGraph] = {}
        self._next: AcceptedAhead | None = None
        self._made_for = 0  # `Placement.row_changes` then: those that join later know nothing of it
        self._by_graphs = True  # whether this round's drafts are
        self._begins = False  # whether nothing of some row is in the caches yet, which graphs take for granted
        self._rests = False  # whether nothing is drafted because it would be in vain
        self.choosing.stats.fall_back(self.graphs.disabled_reason)

    def draft(self, batch: RoundBatch) -> DraftTree:
        made, self._next = self._next, None
        plan, depth = batch.plan, batch.draft_depth
        self._begins = not min(self.caches.target.lengths)
        is_drafted = plan is not None and depth > 0 and plan.tokens is None
        self._by_graphs = self.drafting is not None and is_drafted and not self._begins
        self._rests = self.drafting is None or (plan is not None and plan.skips)
        if self.drafting is None or plan is None or not self._by_graphs:
            return super().draft(batch)
        with self.clock.phase("draft"):
            self.drafting.catch_up()
            tree = None
            same_rows = self._made_for == self.caches.target.placement.row_changes
            if made is not None and same_rows and _serves(made.shape, plan.shape):
                tree = made.to_tree(depth)
            if tree is None:
                tree = self._whole_draft(self.drafting, plan.shape, depth, batch)
            return propose(self.drafting, batch, self.choosing, self.drafting.drafter) if tree is None else tree

    def _whole_draft(
        self, drafting: CompiledDrafting, shape: DraftShape, depth: int, batch: RoundBatch
    ) -> DraftTree | None:
        """A draft by one graph; `None` where there is none."""
        rule = only_one(self.choosing.choice_rules(batch))
        if rule is None:
            return None
        processing = rule.processing
        is_never_asked = processing.in_order and not processing.can_fork
        if not shape.is_tree and (shape.min_confidence or not (processing.warps_drafts or is_never_asked)):
            return None
        return drafting.whole(batch.roots, shape, depth, _in_graphs(rule), self._chosen_by(batch, shape.depth))

    def _chosen_by(self, batch: RoundBatch, ahead: int) -> ChosenBy:
        return ChosenBy(self.choosing.noise_for(batch, ahead), self.choosing.seen_before(batch))

    def verify(self, tree: DraftTree) -> TargetOutput:
        if self.verification is None or self._begins:
            return super().verify(tree)
        self.choosing.stats.fall_back(self.graphs.disabled_reason)  # a draft step may have failed
        with self.clock.phase("verify"), self.capturing():
            output = self.verification(tree, rests=self._rests)
        self.choosing.stats.fall_back(self.graphs.disabled_reason)
        return output

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        self._next = None
        graph = self._round_graph(batch)
        if graph is not None and verified.aux is not None:
            with self.clock.phase("draft"):
                made = graph(tree, verified.logits, verified.aux, self._chosen_by(batch, graph.step.looks_ahead))
            if made is not None:
                self._next, self._made_for = made, self.caches.target.placement.row_changes
                return Accepted(tree, made.acceptance, {}, made.for_host)
        return super().accept(tree, verified, batch)

    def _round_graph(self, batch: RoundBatch) -> RoundGraph | None:
        """What accepts drafts of the planned shape and makes the next ones, where nobody else asks for scores."""
        plan, rule = batch.plan, only_one(self.choosing.choice_rules(batch))
        if self.drafting is None or plan is None or plan.tokens is not None or not RoundGraph.serves(plan.shape):
            return None
        if self._begins or rule is None or self.choosing.wants_scores or not rule.processing.warps_drafts:
            return None
        choosing = _in_graphs(rule)
        key = plan.shape, choosing.key
        if key not in self._round_graphs:
            if len(self._round_graphs) == MOST_ROUND_GRAPHS:  # each of a server's clients may ask for something else
                self._round_graphs.clear()
            self._round_graphs[key] = RoundGraph(self.drafting, plan.shape, choosing)
        return self._round_graphs[key]

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        made, session = self._next, self.caches.drafter
        if made is None or session is None:
            return super().commit(accepted, verified, written)
        self.keep(written)
        with self.clock.phase("draft"):
            session.commit(made.state, None, written.counts, made.width)

    def keep(self, written: Written) -> None:
        if self.verification is None:
            super().keep(written)
        else:
            self.verification.keep(written.paths, written.counts)

    def absorb(self, tokens: Sequence[Sequence[int]], aux: Tensor | None) -> None:
        """Read this at once where drafts are made by graphs, else leave it to the next one."""
        if self.drafting is None or not self._by_graphs:
            super().absorb(tokens, aux)
        elif aux is not None:
            with self.clock.phase("draft"):
                self.drafting.absorb(*absorbed(tokens, aux))

    def keeps_ended_rows(self, num_live: int) -> bool:
        compiled = self.verification is not None and not self.graphs.disabled_reason
        return compiled and num_live >= LIVE_SHARE * self.caches.batch_size


def _in_graphs(rule: ChoiceRule) -> GraphChoice:
    warping = rule.processing.draft_warping if rule.processing.warps_drafts else None
    return GraphChoice(rule.draws, warping, checks=rule.fails_alone)


def _serves(made: DraftShape, planned: DraftShape) -> bool:
    """Whether a draft of one shape can be cut to the other; a chain that is shorter than planned is as good."""
    if made.is_tree or planned.is_tree:
        return made == planned
    return planned.min_confidence == 0
