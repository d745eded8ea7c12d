"""What the target makes of a round's drafts, by eager code: at all nodes at once, or at those the text passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..sampling.acceptance import Acceptance, accept_greedy, accept_sampled_target
from ..sampling.draw import argmax, draw
from ..sampling.rejection import accept_rejection
from ..sampling.tree_walk import accept_tree_walk
from ..trees.draft_tree import DraftTree
from .request import DecodingRequest
from .round import Accepted, RoundBatch


class Acceptor:
    """One generation's acceptance of drafts: by rejection where they were drawn, else by what the target chooses.

    Args:
        request: what is written.
    """

    def __init__(self, request: DecodingRequest):
        self.request, self.processing = request, request.processing
        self.host_sync_is_free = request.sequences.prompts.device.type == "cpu"
        # Of scores that need no processing all arg-maxes are had at once.
        self.goes_by_level = not self.processing.scores_only or (request.do_sample and self.host_sync_is_free)

    def __call__(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Accepted:
        """What is accepted, and the processed scores of the accepted nodes (raw logits where nothing changes them).

        Args:
            tree: drafts.
            logits: the target's `(B, N, V)`.
            batch: the rows.
        """
        is_bare = tree.size == 1 and self.processing.scores_only  # nowhere to go: every node is the root
        if tree.proposal is None and self.goes_by_level and not is_bare:  # rejection sampling looks at every node
            return self._accept_by_level(tree, logits, batch)
        scores = self._score_all_nodes(tree, logits, batch)
        if not self.request.do_sample:
            return Accepted(tree, self._accept_likeliest(tree, scores, batch.live), scores)
        probs = scores.softmax(-1)
        if tree.proposal is not None:
            return Accepted(tree, accept_rejection(tree, probs), scores)
        acceptance = accept_sampled_target(tree, probs)
        chances = probs[:, 0].gather(1, acceptance.bonus[:, None]) if tree.size == 1 else None
        return Accepted(tree, acceptance, scores, chances)

    def _accept_by_level(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Accepted:
        request, tokens, rows = self.request, tree.tokens, batch.rows
        decided: dict[tuple[int, int], Tensor] = {}
        for row in rows:
            request.asked.forget_before(row, request.sequences.length(row))

        def choose(walking: Sequence[int], paths: Sequence[list[int]]) -> list[int]:
            nodes, batch_rows = [path[-1] for path in paths], [rows[b] for b in walking]

            def prefix(i: int) -> Tensor:
                return request.sequences.prefix(batch_rows[i], tokens[walking[i], paths[i][1:]])

            scores = self.processing.row_scores(prefix, logits[walking, nodes], batch_rows, request.asked)  # (R, V)
            decided.update(zip(zip(walking, nodes, strict=True), scores, strict=True))
            chosen = (draw(scores.softmax(-1)) if request.do_sample else argmax(scores)).tolist()
            lengths = [
                request.sequences.length(row) + len(path) - 1 for row, path in zip(batch_rows, paths, strict=True)
            ]
            return request.keep_choice(batch_rows, lengths, chosen)

        def ends(b: int, nodes: int, token: int) -> bool:
            return request.sequences.ends_with(rows[b], token, after=nodes - 1)

        # Processors asked in order are done when the text is: a grammar has nothing to say about what comes behind.
        acceptance = accept_tree_walk(tree, choose, batch.live, ends if self.processing.in_order else None)
        return Accepted(tree, acceptance, decided)

    def _score_all_nodes(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Tensor:
        """What the target decides by, `(B, N, V)`: processed scores, or the raw logits where arg-max needs no more."""
        request = self.request
        if self.processing.is_empty and not request.do_sample and not request.keep_scores:
            return logits

        def prefix(b: int, node: int) -> Tensor:
            above = tree.ancestors[b, node].clone()
            above[0] = False  # the root is written already
            return request.sequences.prefix(batch.rows[b], tree.tokens[b][above])

        return self.processing.node_scores(logits, prefix, batch.rows)

    def _accept_likeliest(self, tree: DraftTree, scores: Tensor, live: Sequence[int]) -> Acceptance:
        choice = argmax(scores)  # (B, N)
        if tree.is_chain or not self.host_sync_is_free:
            return accept_greedy(tree, choice)
        chosen = choice.tolist()  # a walk over lists takes less than half of what a CPU needs for 20 operations
        return accept_tree_walk(
            tree, lambda rows, paths: [chosen[b][p[-1]] for b, p in zip(rows, paths, strict=True)], live
        )
