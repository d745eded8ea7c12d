"""A round by eager code: the reference, and what compiled rounds fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ..drafter.assistant import Assistant
from ..drafter.draft_scores import InGrammar, draft_scores, scores_in_grammars
from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import DraftChoice, DraftScores, DraftStepper, grow_tree, propose_chain
from ..drafter.session import absorbed
from ..generation_config import DraftLength
from ..stats import PhaseClock
from ..target.binding import TargetOutput
from ..target.verify import Verification
from ..trees.draft_tree import DraftTree
from ..trees.host_numbers import on_device
from .accept import Acceptor
from .choosing import ChoiceRule, Choosing, only_one, warp_drafts
from .pair_caches import PairCaches
from .round import Accepted, RoundBatch, Written


class EagerRound:
    """A `Round` by eager code.

    Args:
        drafter: attached.
        caches: of target and drafter.
        choosing: how the texts choose their tokens.
        clock: charged with the seconds of drafting and verifying.
    """

    def __init__(self, drafter: Assistant, caches: PairCaches, choosing: Choosing, clock: PhaseClock):
        self.drafter, self.caches, self.choosing, self.clock = drafter, caches, choosing, clock
        self.binding = drafter.binding
        self.acceptor = Acceptor(choosing, caches.target.device)
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
            return propose(session, batch, self.choosing, session.drafter)

    def verify(self, tree: DraftTree) -> TargetOutput:
        with self.clock.phase("verify"), self.capturing():
            return self._verify(tree)

    def capturing(self) -> AbstractContextManager[None]:
        """Around a forward of the target: hidden states are kept where there is a drafter to read them."""
        return nullcontext() if self.caches.drafter is None else self.binding.capturing()

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        return self.acceptor(tree, verified.logits, batch)

    def commit(self, accepted: Accepted, verified: TargetOutput, written: Written) -> None:
        self.keep(written)
        self.absorb(written.tokens, aux_of_path(accepted, verified.aux, max(written.counts)))

    def keep(self, written: Written) -> None:
        """Commit the target's keys, values and states."""
        self.caches.target.keep(written.paths, written.counts)

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


def propose(session: DraftStepper, batch: RoundBatch, choosing: Choosing, drafter: Eagle31Drafter) -> DraftTree:
    """What the drafter proposes step by step, as planned."""
    assert batch.plan is not None, "somebody wants drafts"
    shape, depth, roots = batch.plan.shape, batch.draft_depth, batch.roots
    choice = _draft_choice(batch, choosing, drafter, depth)
    if shape.is_tree:
        return grow_tree(session.root, session.step, session.draft_ids, roots, shape.cut_to(depth), choice)
    return propose_chain(session, roots, DraftLength(depth, shape.min_confidence), choice)


def _draft_choice(batch: RoundBatch, choosing: Choosing, drafter: Eagle31Drafter, depth: int) -> DraftChoice:
    """How tokens of a draft of so many levels are chosen."""
    assert batch.plan is not None, "somebody wants drafts"
    rules, noise = choosing.choice_rules(batch), choosing.noise_for(batch, depth)
    rule = only_one(rules)
    if rule is not None and rule.processing.warps_drafts:
        seen = choosing.seen_before(batch)
        warps = not rule.processing.is_empty and (noise is not None or seen is not None)
        return DraftChoice(rule.processing.draft_warping if warps else None, noise, seen)
    if batch.plan.shape.is_tree:  # processors that look at prefixes would be asked at each node
        return DraftChoice(None, noise)
    if rule is None or rule.fails_alone or rule.processing.can_fork:
        return DraftChoice(_scores_by_row(batch, rules, choosing, drafter), noise)

    def prefix(b: int, drafted: Tensor) -> Tensor:
        return batch.sequences.prefix(batch.rows[b], drafted)

    return DraftChoice(draft_scores(drafter, rule.processing, prefix, batch.rows, do_sample=rule.draws), noise)


def _scores_by_row(
    batch: RoundBatch, rules: Sequence[ChoiceRule], choosing: Choosing, drafter: Eagle31Drafter
) -> DraftScores | None:
    """Drafts of each row keep to its grammar, or whatever else may be copied, and to how its tokens are drawn."""
    scorers = {
        b: InGrammar(
            rule.processing,
            partial(batch.sequences.prefix, batch.rows[b]),
            rule.rows[b],
            eos_ids=batch.sequences.eos_ids,
            report=choosing.stats.fall_back,
        )
        for rule in rules
        if rule.processing.can_fork
        for b in rule.places
        if b in batch.live
    }
    by_row = scores_in_grammars(drafter, scorers) if scorers else None
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


def aux_of_path(accepted: Accepted, aux: Tensor | None, width: int) -> Tensor | None:
    """Hidden states `(B, width, A*Ht)` of the first nodes of each accepted path."""
    if aux is None or accepted.tree.is_chain:
        return aux
    return accepted.acceptance.along(aux, width)
