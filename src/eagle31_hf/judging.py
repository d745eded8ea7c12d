"""What the target makes of a round's drafts, by eager code: at all nodes at once, or at those the text passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .decoding_request import DecodingRequest
from .sampling import (
    Acceptance,
    AcceptanceRule,
    accept_greedy,
    accept_rejection,
    accept_sampled_target,
    draw,
    likeliest,
)
from .tree import DraftTree
from .walking import accept_walking

# Processed scores (V,) of a node, by (row of the caches, node).
NodeScores = Tensor | Mapping[tuple[int, int], Tensor]


class Judge:
    """One generation's acceptance of drafts of one kind.

    Args:
        request: what is written.
        rule: of acceptance.
    """

    def __init__(self, request: DecodingRequest, rule: AcceptanceRule):
        self.request, self.processing, self.rule = request, request.processing, rule
        self.waiting_is_free = request.sequences.prompts.device.type == "cpu"
        by_prefix = not self.processing.scores_only
        # Rejection sampling looks at every node; of scores that need no processing all arg-maxes are had at once.
        self.walks = rule is not AcceptanceRule.REJECTION and (
            by_prefix or (request.do_sample and self.waiting_is_free)
        )

    def __call__(
        self, tree: DraftTree, logits: Tensor, rows: Sequence[int], live: Sequence[int]
    ) -> tuple[Acceptance, NodeScores]:
        """What is accepted, and the processed scores of the accepted nodes (raw logits where nothing changes them).

        Args:
            tree: drafts.
            logits: the target's `(B, N, V)`.
            rows: the row of the whole batch that each of the `B` rows is.
            live: which of the `B` need tokens.
        """
        if self.walks:
            return self._going_down(tree, logits, rows, live)
        scores = self._at_all_nodes(tree, logits, rows)
        return self._by_rule(tree, scores, live), scores

    def _going_down(
        self, tree: DraftTree, logits: Tensor, rows: Sequence[int], live: Sequence[int]
    ) -> tuple[Acceptance, NodeScores]:
        request, tokens = self.request, tree.tokens
        decided: dict[tuple[int, int], Tensor] = {}

        def choose(walking: Sequence[int], paths: Sequence[list[int]]) -> list[int]:
            nodes, batch_rows = [path[-1] for path in paths], [rows[b] for b in walking]

            def prefix(i: int) -> Tensor:
                return request.sequences.prefix(batch_rows[i], tokens[walking[i], paths[i][1:]])

            scores = self.processing.row_scores(prefix, logits[walking, nodes], batch_rows)  # (R, V)
            decided.update(zip(zip(walking, nodes, strict=True), scores, strict=True))
            return (draw(scores.softmax(-1)) if request.do_sample else likeliest(scores)).tolist()

        return accept_walking(tree, choose, live), decided

    def _at_all_nodes(self, tree: DraftTree, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """What the target decides by, `(B, N, V)`: processed scores, or the raw logits where arg-max needs no more."""
        request = self.request
        if self.processing.is_empty and not request.do_sample and not request.keep_scores:
            return logits

        def prefix(b: int, node: int) -> Tensor:
            above = tree.ancestors[b, node].clone()
            above[0] = False  # the root is written already
            return request.sequences.prefix(rows[b], tree.tokens[b][above])

        return self.processing.node_scores(logits, prefix, rows)

    def _by_rule(self, tree: DraftTree, scores: Tensor, live: Sequence[int]) -> Acceptance:
        if self.rule is AcceptanceRule.GREEDY:
            choice = likeliest(scores)  # (B, N)
            if tree.is_chain or not self.waiting_is_free:
                return accept_greedy(tree, choice)
            chosen = choice.tolist()  # a walk over lists takes less than half of what a CPU needs for 20 operations
            return accept_walking(
                tree, lambda rows, paths: [chosen[b][p[-1]] for b, p in zip(rows, paths, strict=True)], live
            )
        probs = scores.softmax(-1)
        if self.rule is AcceptanceRule.REJECTION and tree.proposal is not None:
            return accept_rejection(tree, probs)
        return accept_sampled_target(tree, probs)
