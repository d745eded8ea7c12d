"""What the target makes of a round's drafts, by eager code: at all nodes at once, or at those the text passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling.acceptance import Acceptance, accept_chosen
from ..sampling.draw import argmax, choose
from ..sampling.seen_tokens import seen_at_nodes
from ..sampling.tree_walk import accept_tree_walk
from ..trees.draft_tree import DraftTree
from .request import DecodingRequest
from .round import Accepted, RoundBatch


class Acceptor:
    """One generation's acceptance of drafts: what the target chooses is kept.

    Args:
        request: what is written.
    """

    def __init__(self, request: DecodingRequest):
        self.request, self.processing = request, request.processing
        self.host_sync_is_free = request.sequences.prompts.device.type == "cpu"

    def __call__(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Accepted:
        """What is accepted, and the processed scores of the accepted nodes (raw logits where nothing changes them).

        Args:
            tree: drafts.
            logits: the target's `(B, N, V)`.
            batch: the rows.
        """
        scores = self._score_all_nodes(tree, logits, batch)
        if scores is None:
            return self._accept_by_level(tree, logits, batch)
        return Accepted(tree, self._accept_chosen(tree, self._choose_all(tree, scores, batch), batch.live), scores)

    def _accept_by_level(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Accepted:
        request, tokens, rows = self.request, tree.tokens, batch.rows
        decided: dict[tuple[int, int], Tensor] = {}
        noise = request.noise_ahead(batch, tree.max_depth + 1)
        for row in rows:
            request.asked.forget_before(row, request.sequences.length(row))

        def choose_after(walking: Sequence[int], paths: Sequence[list[int]]) -> list[int]:
            nodes, batch_rows = [path[-1] for path in paths], [rows[b] for b in walking]

            def prefix(i: int) -> Tensor:
                return request.sequences.prefix(batch_rows[i], tokens[walking[i], paths[i][1:]])

            scores = self.processing.row_scores(prefix, logits[walking, nodes], batch_rows, request.asked)  # (R, V)
            decided.update(zip(zip(walking, nodes, strict=True), scores, strict=True))
            depths = [len(path) - 1 for path in paths]
            chosen = (argmax(scores) if noise is None else choose(scores, noise[walking, depths])).tolist()
            lengths = [
                request.sequences.length(row) + len(path) - 1 for row, path in zip(batch_rows, paths, strict=True)
            ]
            return request.keep_choice(batch_rows, lengths, chosen)

        def ends(b: int, nodes: int, token: int) -> bool:
            return request.sequences.ends_with(rows[b], token, after=nodes - 1)

        # Processors asked in order are done when the text is: a grammar has nothing to say about what comes behind.
        acceptance = accept_tree_walk(tree, choose_after, batch.live, ends if self.processing.in_order else None)
        return Accepted(tree, acceptance, decided)

    def _score_all_nodes(self, tree: DraftTree, logits: Tensor, batch: RoundBatch) -> Tensor | None:
        """What the target decides by, `(B, N, V)`: processed scores, or the raw logits where arg-max needs no more.

        `None` where processors want to see each prefix. On a CPU a repetition penalty does, too: to penalize the few
        tokens that are asked about takes less there than a mask over all.
        """
        request = self.request
        if not self.processing.scores_only:
            seen = None if self.host_sync_is_free else request.seen_before(batch)
            if seen is None:
                return None
            return self.processing.draft_warping.of_nodes(logits, seen_at_nodes(seen, tree.tokens, tree.ancestors))
        if self.processing.is_empty and not request.do_sample and not request.keep_scores:
            return logits

        def prefix(b: int, node: int) -> Tensor:
            raise AssertionError("processors that look at scores alone ask for no prefix")

        return self.processing.node_scores(logits, prefix, batch.rows)

    def _choose_all(self, tree: DraftTree, scores: Tensor, batch: RoundBatch) -> Tensor:
        """The target's token after every node, `(B, N)`."""
        noise = self.request.noise_ahead(batch, tree.max_depth + 1)  # (B, D + 1, V)
        if noise is None:
            return argmax(scores)
        if not tree.is_chain:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            noise = noise[rows, tree.positions]
        return choose(scores, noise)

    def _accept_chosen(self, tree: DraftTree, choice: Tensor, live: Sequence[int]) -> Acceptance:
        if tree.is_chain or not self.host_sync_is_free:
            return accept_chosen(tree, choice)
        chosen = choice.tolist()  # a walk over lists takes less than half of what a CPU needs for 20 operations
        return accept_tree_walk(
            tree, lambda rows, paths: [chosen[b][p[-1]] for b, p in zip(rows, paths, strict=True)], live
        )
