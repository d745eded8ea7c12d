"""A round: draft, verify, accept, commit. Each step is answered by a graph where there is one, else by eager code.

With chains of fixed length and trees a round is two graphs, sampled or not: the target's verification, and one that
accepts, reads and drafts again. A chain that doubt may end takes a graph per draft step. Nothing made ahead is kept
before the host has seen where the text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..drafter.assistant import Assistant
from ..drafter.draft_scores import RowScores, draft_scores
from ..drafter.drafter import Eagle31Drafter
from ..drafter.dynamic import grow_tree
from ..drafter.propose import DraftChoice, DraftScores, draft_chain
from ..drafter.session import DraftSession, absorbed
from ..drafting.draft_tree import DraftTree
from ..drafting.host_numbers import on_device
from ..drafting.plan import DraftPolicy
from ..drafting.shape import DraftShape
from ..graphs.draft_graphs import ChosenBy, CompiledDrafting, GraphChoice
from ..graphs.graphs import Graphs
from ..graphs.round_graphs import AcceptedAhead, RoundStep
from ..graphs.verify import CompiledVerification
from ..stats import RoundClock
from ..targets.binding import TargetOutput, Verification
from .accept import Accepted, Acceptor
from .choosing import ChoiceRule, Choosing, RoundBatch, warp_drafts
from .pair_caches import PairCaches

LIVE_SHARE = 0.25
"""Share of a batch by graphs that must need tokens for the others to stay in it; measured on a small pair only."""


class Round:
    """One round after the other over one pair of caches. Each step may fail: nothing is kept of a round before
    `commit`.

    Without a drafter the target's verification alone has a graph.

    Args:
        drafter: attached.
        caches: of target and drafter: all that outlives a round.
        choosing: the texts, and how they choose their tokens.
        clock: told of the one wait of a round.
        graphs: the pair's; `None`: all is eager code.
    """

    def __init__(
        self,
        drafter: Assistant,
        caches: PairCaches,
        choosing: Choosing,
        clock: RoundClock,
        graphs: Graphs | None = None,
    ):
        self.caches, self.choosing, self.clock, self.binding = caches, choosing, clock, drafter.binding
        self.graphs = graphs if graphs is not None and self._serve_graphs() else None
        self.drafting: CompiledDrafting | None = None
        self.eager = Verification(self.binding, caches.target)
        self.verification: CompiledVerification | None = None
        self._ahead: AcceptedAhead | None = None  # the next draft, if a graph has made it
        self._made_for = 0  # `Placement.row_changes` then: those that join later know nothing of it
        self._by_graphs: CompiledDrafting | None = None  # what this round's drafts are made with, if not by eager code
        clock.graphs = self.num_graphs
        if self.graphs is not None:
            most = choosing.shape.nodes
            self.verification = CompiledVerification(self.binding, caches.target, self.graphs, most_nodes=most)
            self.drafting = None if caches.drafter is None else CompiledDrafting(caches.drafter, self.graphs)
            choosing.stats.fall_back(self.graphs.disabled_reason)

    @property
    def num_graphs(self) -> int:
        """That are made by now."""
        return 0 if self.graphs is None else len(self.graphs.keys)

    def _serve_graphs(self) -> bool:
        """Whether graphs serve rounds over these caches; if not, `stats` says why."""
        target, session, why = self.caches.target, self.caches.drafter, ""
        if target.has_states and target.has_windows:
            why = "rounds are not compiled where some layers of the target keep states and others see a window"
        if session is not None and session.cache.has_windows:
            why = "rounds are not compiled where the drafter sees a window of the text only"
        self.choosing.stats.fall_back(why)
        return not why

    # --- draft ---------------------------------------------------------------------------------------------------

    def draft(self, batch: RoundBatch) -> DraftTree:
        """This round's drafts as planned, or fewer where there is no room for as many."""
        ahead, self._ahead, self._by_graphs = self._ahead, None, None
        session, plan, depth = self.caches.drafter, batch.plan, batch.draft_depth
        if plan is None or depth < 1:
            return DraftTree.chain(batch.roots[:, None])
        if plan.tokens is not None:
            return given_chain(batch, plan.tokens, depth)
        if session is None:
            return DraftTree.chain(batch.roots[:, None])
        if self.drafting is None:
            session.catch_up()
            return propose(session, batch, session.drafter)
        self._by_graphs = self.drafting
        self.drafting.catch_up()
        tree = self._draft_at_once(self.drafting, ahead, plan.shape, batch)
        return propose(self.drafting, batch, session.drafter) if tree is None else tree

    def _draft_at_once(
        self, drafting: CompiledDrafting, ahead: AcceptedAhead | None, shape: DraftShape, batch: RoundBatch
    ) -> DraftTree | None:
        """What the last round's end has drafted ahead, or a draft by one graph; `None` where there is neither."""
        same_rows = self._made_for == self.caches.target.placement.row_changes
        if ahead is not None and same_rows and _serves(ahead.shape, shape):
            return ahead.draft.to_tree(ahead.shape, batch.draft_depth)
        rule = batch.only_rule
        if rule is None:
            return None
        processing = rule.processing
        is_never_asked = processing.in_order and not processing.can_fork
        if not shape.is_tree and (shape.min_confidence or not (processing.warps_drafts or is_never_asked)):
            return None
        roots, depth = batch.roots, batch.draft_depth
        return drafting.whole(roots, shape, depth, _in_graphs(rule), _chosen_by(batch, shape.depth))

    # --- verify --------------------------------------------------------------------------------------------------

    def verify(self, tree: DraftTree) -> TargetOutput:
        """Logits `(B, N, V)` and, for a drafter, hidden states `(B, N, A*Ht)` of every node, in one target forward."""
        with nullcontext() if self.caches.drafter is None else self.binding.capturing():
            if self.verification is None:
                return self.eager(tree)
            output = self.verification(tree)
        self.choosing.stats.fall_back(self.verification.graphs.disabled_reason)
        return output

    # --- accept --------------------------------------------------------------------------------------------------

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        """What the target says to the drafts. The host waits for the device here; in drafting it does only where doubt
        may end a chain, or processors look at the tokens drafted before."""
        self._ahead, step = None, self._round_step(batch)
        if self.drafting is not None and step is not None:
            chosen_by = _chosen_by(batch, step.looks_ahead)
            self._ahead = step.advance(self.drafting, tree, verified, chosen_by)
        if self._ahead is None:
            accepted = Acceptor(tree, verified.logits, batch).accept(self._is_broken(batch))
        else:
            self._made_for = self.caches.target.placement.row_changes
            accepted = Accepted.by_graph(self._ahead.for_host)
        self.clock.note_wait(self.num_graphs)
        return accepted

    def _is_broken(self, batch: RoundBatch) -> Tensor | None:
        """`(B, 1)` whether the scores that drafts were chosen by are no numbers; `None`: the drafter has made none."""
        session, plan = self.caches.drafter, batch.plan
        if session is None or plan is None or plan.tokens is not None or batch.draft_depth < 1:
            return None
        return session.root.logits[:, 0, :1].isnan()

    def _round_step(self, batch: RoundBatch) -> RoundStep | None:
        """What accepts drafts of the planned shape and makes the next ones, where scores are of no other use."""
        if self.drafting is None:
            return None
        plan, rule = batch.plan, batch.only_rule
        if plan is None or plan.tokens is not None or not RoundStep.serves(plan.shape):
            return None
        if rule is None or self.choosing.wants_scores or not rule.processing.warps_drafts:
            return None
        return RoundStep(self.drafting.drafter, plan.shape, _in_graphs(rule))

    # --- commit --------------------------------------------------------------------------------------------------

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Sequence[Sequence[int]]) -> None:
        """Keep what was written in the target's cache; by its next draft the drafter has read it, too.

        Args:
            written: tokens of each row: fewer than accepted ones where its text has ended, none where it stands still.
        """
        counts = [len(tokens) for tokens in written]
        keeping = self.caches.target if self.verification is None else self.verification
        keeping.keep([path[:count] for path, count in zip(accepted.paths, counts, strict=True)])
        ahead, session = self._ahead, self.caches.drafter
        if ahead is not None and session is not None:
            session.commit(ahead.state, counts)
        else:
            self.absorb(written, aux_of_path(accepted.paths, verified.aux, max(counts)))

    def absorb(self, tokens: Sequence[Sequence[int]], aux: Tensor | None) -> None:
        """Read this at once where drafts are made by graphs, else leave it to the next draft: before a pause that need
        not be soon, at a text's end never."""
        session = self.caches.drafter
        if session is None or aux is None:
            return
        width = len(tokens[0])
        if self._by_graphs is not None:
            self._by_graphs.absorb(*absorbed(tokens, aux))
        elif all(len(row) == width for row in tokens):
            session.put_off(tokens, aux if aux.shape[1] == width else aux.narrow(1, 0, width))
        else:
            session.absorb(*absorbed(tokens, aux))

    def record(
        self,
        policy: DraftPolicy,
        tree: DraftTree,
        batch: RoundBatch,
        accepted: Accepted,
        written: Sequence[Sequence[int]],
    ) -> None:
        """Count the round, and tell the policy what became of its plan; `written` as of `commit`."""
        stats, plan, depth = self.choosing.stats, batch.plan, tree.max_depth
        counts = [len(accepted.paths[b]) - 1 for b in batch.live]
        looked_up = plan is not None and plan.tokens is not None
        kept = [len(written[b]) for b in batch.live]
        stats.record_round(depth=depth, nodes=tree.size - 1, accepted=counts, written=kept, looked_up=looked_up)
        if plan is not None:
            stats.skipped_rounds += not plan.shape.depth
            policy.record(plan, depth, [batch.rows[b] for b in batch.live], counts, self.clock.round_s)

    # --- rows ----------------------------------------------------------------------------------------------------

    def keeps_ended_rows(self, num_live: int) -> bool:
        """Whether ended rows had better stay in the batch while so many need tokens: graphs are made for its size."""
        by_graphs = self.graphs is not None and not self.graphs.disabled_reason
        return by_graphs and num_live >= LIVE_SHARE * self.caches.batch_size


def _chosen_by(batch: RoundBatch, count: int) -> ChosenBy:
    """What the next `count` tokens are chosen by."""
    return ChosenBy(batch.choosing.noise_for(batch, count), batch.choosing.seen_before(batch))


def _in_graphs(rule: ChoiceRule) -> GraphChoice:
    warping = rule.processing.draft_warping if rule.processing.warps_drafts else None
    return GraphChoice(rule.draws, warping, checks=rule.fails_alone)


def _serves(made: DraftShape, planned: DraftShape) -> bool:
    """Whether a draft of one shape can be cut to the other; a chain that is shorter than planned is as good."""
    if made.is_tree or planned.is_tree:
        return made == planned
    return planned.min_confidence == 0


# --- drafts by eager code ---------------------------------------------------------------------------------------------


def propose(session: DraftSession | CompiledDrafting, batch: RoundBatch, drafter: Eagle31Drafter) -> DraftTree:
    """What the drafter proposes step by step, as planned."""
    assert batch.plan is not None, "drafts are planned"
    shape, choice = batch.plan.shape.cut_to(batch.draft_depth), _draft_choice(batch, drafter, batch.draft_depth)
    made_of = session.root, session.step, session.draft_ids, batch.roots, shape, choice
    return grow_tree(*made_of) if batch.plan.shape.is_tree else DraftTree.chain(draft_chain(*made_of))


def _draft_choice(batch: RoundBatch, drafter: Eagle31Drafter, depth: int) -> DraftChoice:
    """How tokens of a draft of so many levels are chosen."""
    assert batch.plan is not None, "drafts are planned"
    rule = batch.only_rule
    if rule is not None and rule.processing.warps_drafts:
        return _in_graphs(rule).of_drafts(_chosen_by(batch, depth))
    noise = batch.choosing.noise_for(batch, depth)
    if batch.plan.shape.is_tree:  # processors that look at prefixes would be asked at each node
        return DraftChoice(None, noise)
    return DraftChoice(_scores_by_row(batch, drafter), noise)


def _scores_by_row(batch: RoundBatch, drafter: Eagle31Drafter) -> DraftScores | None:
    """Drafts of each row keep to its grammar, or what else of its processors may be shown drafts, and to how its tokens
    are drawn. Of rows that fail alone only grammars are asked: others would cost more than they bring."""
    rules = batch.rules
    scorers = {
        b: RowScores(
            rule.processing,
            partial(batch.sequences.prefix, batch.rows[b]),
            rule.rows[b],
            eos_ids=batch.sequences.eos_ids,
            report=batch.choosing.stats.fall_back,
        )
        for rule in rules
        if rule.processing.can_fork and (rule.processing.in_order or not rule.fails_alone)
        for b in rule.places
        if b in batch.live
    }
    by_row = draft_scores(drafter, scorers) if scorers else None
    if by_row is None and not any(rule.draws for rule in rules):
        return None

    def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        return warp_drafts(rules, logits.float() if by_row is None else by_row(logits, drafted))

    return scores


def given_chain(batch: RoundBatch, tokens: Sequence[Sequence[int]], depth: int) -> DraftTree:
    """Drafts that are there already, a chain per live row; shorter ones are filled up with what is unlikely to follow.

    Args:
        batch: the rows.
        tokens: of each live row.
        depth: longest chain.
    """
    depth = min(depth, max(len(chain) for chain in tokens))
    drafts = [[0] * depth for _ in batch.rows]
    for b, chain in zip(batch.live, tokens, strict=True):
        drafts[b][: len(chain)] = chain[:depth]
    drafted = on_device(drafts, batch.roots.device).view(len(drafts), depth)
    return DraftTree.chain(torch.cat((batch.roots[:, None], drafted), dim=1))


def aux_of_path(paths: Sequence[Sequence[int]], aux: Tensor | None, width: int) -> Tensor | None:
    """Hidden states of the first `width` nodes of each accepted path, of all nodes' `(B, N, A*Ht)`, in the first of as
    many columns or more."""
    if aux is None or all(node == place for path in paths for place, node in enumerate(path)):
        return aux
    nodes = on_device([[*path, *[0] * width][:width] for path in paths], aux.device)
    return aux.gather(1, nodes[:, :, None].expand(-1, -1, aux.shape[2]))
