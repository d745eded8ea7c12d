"""A round by eager code: the reference, and what compiled rounds fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..drafter.draft_scores import GrammarDrafts, draft_scores
from ..drafter.drafter import Eagle31Drafter
from ..drafter.hindsight import FirstDrafts, Hindsight
from ..drafter.propose import DraftChoice, DraftStepper, propose_chain, propose_dynamic_tree
from ..drafter.session import absorbed
from ..generation_config import DraftLength
from ..stats import PhaseClock
from ..target.binding import TargetOutput
from ..target.verify import Verification
from ..trees.draft_tree import DraftTree
from ..trees.host_numbers import on_device
from .accept import Acceptor
from .pair_caches import PairCaches
from .request import DecodingRequest
from .round import Accepted, RoundBatch, Written


class EagerRound:
    """A `Round` by eager code.

    Args:
        drafter: attached.
        caches: of target and drafter.
        request: what is written.
        clock: charged with the seconds of drafting and verifying.
    """

    def __init__(self, drafter: Eagle31Drafter, caches: PairCaches, request: DecodingRequest, clock: PhaseClock):
        self.drafter, self.caches, self.request, self.clock = drafter, caches, request, clock
        self.binding = drafter.require_binding()
        self.acceptor = Acceptor(request)
        self._verify = Verification(self.binding, caches.target)

    def draft(self, batch: RoundBatch) -> DraftTree:
        session, plan, depth = self.caches.drafter, batch.plan, batch.draft_depth
        with self.clock.phase("draft"):
            if plan is None or depth < 1:
                return DraftTree.chain(batch.roots[:, None])
            if plan.tokens is not None:
                return given_chain(batch, plan.tokens, depth)
            if session is None:
                return DraftTree.chain(batch.roots[:, None])
            session.catch_up()
            return propose(session, batch, self.request, self.drafter)

    def verify(self, tree: DraftTree) -> TargetOutput:
        capturing = self.binding.capturing() if self.caches.drafter is not None else nullcontext()
        with self.clock.phase("verify"), capturing:
            return self._verify(tree)

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        return self.acceptor(tree, verified.logits, batch)

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        counts = written.counts
        self.caches.target.keep(written.paths, counts)
        self.absorb(written.tokens, aux_of_path(accepted, verified.aux, max(counts)))

    def read_prompts(self, tokens: Tensor, aux: Tensor, counts: Sequence[int]) -> Hindsight:
        session = self.caches.drafter
        if session is None:
            return Hindsight()
        first = self._first_drafts(None)
        if first is not None:
            return session.absorb_judging(tokens, aux, counts, first)
        session.absorb(tokens, aux, counts)
        return Hindsight()

    def look_back(self, batch: RoundBatch) -> Hindsight:
        session = self.caches.drafter
        if session is None:
            return Hindsight()
        with self.clock.phase("draft"):
            first = self._first_drafts(batch)
            if first is not None:
                return session.look_back(first)
            session.catch_up()
            return Hindsight()

    def _first_drafts(self, batch: RoundBatch | None) -> FirstDrafts | None:
        """How a draft's first token is chosen, behind what was written last or (no batch) in a prompt; `None` where
        that depends on more than the drafter's scores."""
        request = self.request
        if not request.processing.fits_draft_vocabulary:
            return None
        children = request.shape.top_k
        if not request.do_sample:
            return FirstDrafts(children)
        noise = None if batch is None else partial(request.noise_behind, batch)
        return FirstDrafts(children, request.processing.draft_warping.of_nodes, noise)

    def absorb(self, tokens: Sequence[Sequence[int]], aux: Tensor | None) -> None:
        """Leave it to the next draft to read this: before a pause that need not be soon, at a text's end never."""
        session = self.caches.drafter
        if session is not None and aux is not None:
            with self.clock.phase("draft"):
                width = len(tokens[0])
                if all(len(row) == width for row in tokens):
                    session.put_off(tokens, aux if aux.shape[1] == width else aux.narrow(1, 0, width))
                else:
                    session.absorb(*absorbed(tokens, aux))

    def select_rows(self, rows: Sequence[int]) -> None:
        self.caches.select_rows(rows)

    def keeps_ended_rows(self, num_live: int) -> bool:
        return False


def propose(session: DraftStepper, batch: RoundBatch, request: DecodingRequest, drafter: Eagle31Drafter) -> DraftTree:
    """What the drafter proposes step by step, as planned."""
    assert batch.plan is not None, "somebody wants drafts"
    shape, depth, roots = batch.plan.shape, batch.draft_depth, batch.roots
    processing = request.processing
    noise, seen = request.noise_ahead(batch, depth), request.seen_before(batch)
    warps = processing.warps_drafts and not processing.is_empty and (noise is not None or seen is not None)
    choice = DraftChoice(processing.draft_warping if warps else None, noise, seen)
    if shape.is_tree:
        return propose_dynamic_tree(session, roots, shape.cut_to(depth), choice)
    length = DraftLength(depth, shape.min_confidence)
    if processing.warps_drafts:
        return propose_chain(session, roots, length, choice)

    def prefix(b: int, drafted: Tensor) -> Tensor:
        return batch.sequences.prefix(batch.rows[b], drafted)

    grammar = GrammarDrafts(batch.live, batch.sequences.rules.eos_ids, request.stats.fall_back)
    scores = draft_scores(drafter, processing, prefix, batch.rows, do_sample=request.do_sample, grammar=grammar)
    return propose_chain(session, roots, length, DraftChoice(scores, noise))


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


def aux_of_path(accepted: Accepted, aux: Tensor | None, width: int) -> Tensor | None:
    """Hidden states `(B, width, A*Ht)` of the first nodes of each accepted path."""
    if aux is None or accepted.tree.is_chain:
        return aux
    return accepted.acceptance.along(aux, width)
