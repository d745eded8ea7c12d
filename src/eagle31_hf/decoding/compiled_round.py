"""A round by graphs of fixed shape: the target's verification, and one that accepts, reads and drafts again.

With chains of fixed length and trees a round is these two, sampled or not. A chain that doubt may end takes a graph per
draft step; what has no graph is eager code (`EagerRound`). Nothing made ahead is committed
before the host has seen where the text ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..compiled.captured import maker_at_hand
from ..compiled.draft_graphs import ChosenBy, GraphSampling
from ..compiled.draft_session import CompiledDrafting
from ..compiled.graphs import Graphs
from ..compiled.round_graphs import NextDraft, RoundGraph
from ..compiled.verify import CompiledVerification
from ..drafter.drafter import Eagle31Drafter
from ..drafter.hindsight import Hindsight
from ..drafter.session import absorbed
from ..stats import PhaseClock
from ..target.binding import TargetOutput
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape
from .eager_round import EagerRound, aux_of_path, propose
from .pair_caches import PairCaches
from .request import DecodingRequest
from .round import Accepted, RoundBatch, Written

LIVE_SHARE = 0.25
"""Share of a compiled batch that must need tokens for the others to stay in it; measured on a small pair only."""


class CompiledRound:
    """A `Round` by graphs, where they can be had. Arguments are `EagerRound`'s; the caches must have a drafter.

    Over caches of 8 bits, which compiled code cannot read, the target stays eager.
    """

    def __init__(self, drafter: Eagle31Drafter, caches: PairCaches, request: DecodingRequest, clock: PhaseClock):
        assert caches.drafter is not None, "without a drafter there is nothing to compile for"
        self.eager = EagerRound(drafter, caches, request, clock)
        self.drafter, self.caches, self.request, self.clock = drafter, caches, request, clock
        maker = request.graph_maker or maker_at_hand(self.eager.binding)
        were_seen = request.graph_maker is not None and maker.weights_seen
        self.graphs = (Graphs.now(drafter) if were_seen else Graphs.of(drafter)).made_by(maker)
        self.drafting = CompiledDrafting(caches.drafter, self.graphs)
        self.verification: CompiledVerification | None = None
        if request.stats.cache_type == "full":
            most = request.shape.nodes
            self.verification = CompiledVerification(self.eager.binding, caches.target, self.graphs, most_nodes=most)
        else:
            self.request.stats.fall_back("verification is not compiled over a cache in 8 bits")
        self._round_graphs: dict[DraftShape, RoundGraph] = {}
        self._next: NextDraft | None = None
        self._by_graphs = True  # whether this round's drafts are
        self._rests = False  # whether nothing is drafted because it would be in vain
        self.request.stats.fall_back(self.graphs.disabled_reason)

    def draft(self, batch: RoundBatch) -> DraftTree:
        made, self._next = self._next, None
        plan, depth = batch.plan, batch.draft_depth
        self._by_graphs = plan is not None and depth > 0 and plan.tokens is None
        self._rests = plan is not None and plan.skips
        if plan is None or not self._by_graphs:
            return self.eager.draft(batch)
        with self.clock.phase("draft"):
            self.drafting.catch_up()
            tree = None
            if made is not None and _serves(made.shape, plan.shape):
                tree = made.to_tree(depth)
            if tree is None:
                tree = self._whole_draft(plan.shape, depth, batch)
            return propose(self.drafting, batch, self.request, self.drafter) if tree is None else tree

    def _whole_draft(self, shape: DraftShape, depth: int, batch: RoundBatch) -> DraftTree | None:
        """A draft by one graph; `None` where there is none."""
        request = self.request
        processing = request.processing
        warping = processing.draft_warping if processing.warps_drafts else None
        sampling = GraphSampling.of(sample=request.do_sample, warping=warping)
        by = self._chosen_by(batch, shape.depth)
        if shape.is_tree:
            return self.drafting.tree(batch.roots, shape, depth, sampling, by)
        is_never_asked = processing.in_order and not processing.can_fork
        if shape.min_confidence or not (processing.warps_drafts or is_never_asked):
            return None
        chain = self.drafting.chain(batch.roots, shape.depth, sampling, by)
        return None if chain is None else chain.to_tree(depth)

    def _chosen_by(self, batch: RoundBatch, ahead: int) -> ChosenBy:
        return ChosenBy(self.request.noise_ahead(batch, ahead), self.request.seen_before(batch))

    def verify(self, tree: DraftTree) -> TargetOutput:
        if self.verification is None:
            return self.eager.verify(tree)
        self.request.stats.fall_back(self.graphs.disabled_reason)  # a draft step may have failed
        with self.clock.phase("verify"), self.eager.binding.capturing():
            output = self.verification(tree, rests=self._rests)
        self.request.stats.fall_back(self.graphs.disabled_reason)
        return output

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        self._next = None
        graph = self._round_graph(batch)
        if graph is not None and verified.aux is not None:
            with self.clock.phase("draft"):
                made = graph(tree, verified.logits, verified.aux, self._chosen_by(batch, graph.looks_ahead))
            if made is not None:
                self._next = made.draft
                return Accepted(tree, made.acceptance, {}, made.for_host)
        return self.eager.accept(tree, verified, batch)

    def _round_graph(self, batch: RoundBatch) -> RoundGraph | None:
        """What accepts drafts of the planned shape and makes the next ones, where nobody else asks for scores."""
        request, plan = self.request, batch.plan
        if plan is None or plan.tokens is not None or not RoundGraph.serves(plan.shape):
            return None
        if request.keep_scores or request.keep_logits or not request.processing.warps_drafts:
            return None
        if plan.shape not in self._round_graphs:
            self._round_graphs[plan.shape] = RoundGraph(
                self.drafting, plan.shape, sample=request.do_sample, warping=request.processing.draft_warping
            )
        return self._round_graphs[plan.shape]

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        counts = written.counts
        self.caches.target.keep(written.paths, counts)
        made, session = self._next, self.caches.drafter
        if made is None or session is None:
            self._absorb(written.tokens, aux_of_path(accepted, verified.aux, max(counts)))
            return
        with self.clock.phase("draft"):
            session.commit(made.state, made.rotary, counts, made.width)

    def read_prompts(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> Hindsight:
        return self.eager.read_prompts(tokens, aux, counts)

    def look_back(self, batch: RoundBatch) -> Hindsight:
        return self.eager.look_back(batch)

    def _absorb(self, tokens: Sequence[Sequence[int]], aux: Tensor | None) -> None:
        if not self._by_graphs:
            self.eager.absorb(tokens, aux)
        elif aux is not None:
            with self.clock.phase("draft"):
                self.drafting.absorb(*absorbed(tokens, aux))

    def select_rows(self, rows: Sequence[int]) -> None:
        self._next = None
        self.caches.select_rows(rows)

    def keeps_ended_rows(self, num_live: int) -> bool:
        compiled = self.verification is not None and not self.graphs.disabled_reason
        return compiled and num_live >= LIVE_SHARE * self.caches.batch_size


def _serves(made: DraftShape, planned: DraftShape) -> bool:
    """Whether a draft of one shape can be cut to the other; a chain that is shorter than planned is as good."""
    if made.is_tree or planned.is_tree:
        return made == planned
    return planned.min_confidence == 0
