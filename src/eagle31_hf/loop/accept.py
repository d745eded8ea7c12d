"""What the target makes of a round's drafts: read back from a graph, or found by eager code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree
from ..sampling.acceptance import accept_path
from ..sampling.seen_tokens import seen_at_nodes
from .choosing import ChoiceRule, RoundBatch

# Processed scores (V,) of a node, by (row of the caches, node); or of all nodes, (B, N, V).
NodeScores = Tensor | Mapping[tuple[int, int], Tensor]

ASKED_NODE_BY_NODE = ("cpu",)
"""Devices on which a repetition penalty is asked about the nodes of a path alone: the host waits for none of them."""


class Accepted(NamedTuple):
    """What the target accepts of a tree, on the host.

    Attributes:
        paths: accepted nodes of each row, the root first.
        tokens: new ones of each row, those of its path and one that the target adds; past the row's end, too.
        is_broken: whether the drafter's scores are no numbers.
        scores: processed ones of the accepted nodes, where they are wanted (raw logits where nothing changes them).
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    is_broken: bool
    scores: NodeScores

    @classmethod
    def by_graph(cls, table: Tensor) -> Accepted:
        """What a graph has put together (`acceptance.for_host`)."""
        paths, tokens, broken = [], [], []
        for is_broken, count, bonus, *path in table.tolist():
            nodes, drafts = path[: len(path) // 2], path[len(path) // 2 :]
            paths.append(nodes[:count])
            tokens.append([*drafts[1:count], bonus])
            broken.append(is_broken)
        return cls(paths, tokens, any(broken), {})


class Acceptor:
    """Acceptance of one round's drafts by eager code: what the target chooses is kept.

    Args:
        tree: drafts.
        logits: the target's `(B, N, V)`.
        batch: the rows.
    """

    def __init__(self, tree: DraftTree, logits: Tensor, batch: RoundBatch):
        self.tree, self.logits, self.batch = tree, logits, batch
        self.noise = batch.choosing.noise_for(batch, tree.max_depth + 1)  # (B, D + 1, V)
        self._scores: dict[tuple[int, int], Tensor] = {}  # processed ones of the nodes that were asked about alone

    def accept(self, is_broken: Tensor | None = None) -> Accepted:
        """What is accepted. Waits for the device once, and for each node whose prefix processors look at.

        Args:
            is_broken: `(B, 1)` whether the drafter's scores are no numbers; `None`: it has made no draft.
        """
        asked: dict[int, ChoiceRule] = {}
        choice = self.tree.tokens  # of rows that are asked it means nothing
        found: NodeScores = self._scores
        for rule in self.batch.rules:
            scores = self._score_all_nodes(rule)
            if scores is None:
                asked |= dict.fromkeys(rule.places, rule)
            else:
                choice, found = rule.put(self._choose_at_all_nodes(rule, scores), choice), scores
        numbers = [choice, self.tree.tokens, self.tree.parents]
        if is_broken is not None:
            numbers.append(is_broken.expand_as(choice))
        table = torch.stack(numbers, dim=1).tolist()
        walks = [self._walk(b, asked.get(b), *row[:3]) for b, row in enumerate(table)]
        broken = is_broken is not None and any(row[3][0] for row in table)
        return Accepted([path for path, _ in walks], [tokens for _, tokens in walks], broken, found)

    # --- at all nodes at once ------------------------------------------------------------------------------------

    def _score_all_nodes(self, rule: ChoiceRule) -> Tensor | None:
        """What the target decides by, `(R, N, V)`: processed scores, or the raw logits where arg-max needs no more.

        `None` where processors want to see each prefix. On a CPU a repetition penalty does, too: to penalize the few
        tokens that are asked about takes less there than a mask over all.
        """
        processing, choosing, tree = rule.processing, self.batch.choosing, self.tree
        if processing.scores_only:
            is_raw = processing.is_empty and not rule.draws and not choosing.wants_scores
            return rule.of(self.logits) if is_raw else processing.draft_warping.of_nodes(rule.of(self.logits))
        if not processing.warps_drafts or tree.tokens.device.type in ASKED_NODE_BY_NODE:
            return None
        if (seen := choosing.seen_before(self.batch)) is None:
            return None
        at_nodes = seen_at_nodes(rule.of(seen), rule.of(tree.tokens), rule.of(tree.ancestors))
        return processing.draft_warping.of_nodes(rule.of(self.logits), at_nodes)

    def _choose_at_all_nodes(self, rule: ChoiceRule, scores: Tensor) -> Tensor:
        """The target's token after every node, `(R, N)`."""
        if self.noise is None or not rule.draws:
            return rule.choose(scores, None)
        noise = rule.of(self.noise)
        if not self.tree.is_chain:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            noise = noise[rows, rule.of(self.tree.depths)]
        return rule.choose(scores, noise)

    # --- where the text goes -------------------------------------------------------------------------------------

    def _walk(
        self, b: int, asked: ChoiceRule | None, choice: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Accepted nodes and new tokens of a row.

        Args:
            asked: the rule that says what the target chooses; `None`: `choice` does, the tokens after all nodes.
            tokens, parents: of the nodes.
        """
        longest = self.tree.max_depth + 1
        if asked is None:
            path, bonus = accept_path(tokens, parents, lambda path: choice[path[-1]], longest)
        elif b in self.batch.live:
            ends = None if asked.ends is None else partial(asked.ends, b)
            path, bonus = accept_path(tokens, parents, partial(self._ask, asked, b), longest, ends)
        else:
            path, bonus = [0], 0
        return path, [*(tokens[node] for node in path[1:]), bonus]

    def _ask(self, rule: ChoiceRule, b: int, path: list[int]) -> int:
        """The target's token of a row after the last node of a path."""
        batch, node, row = self.batch, path[-1], rule.rows[b]
        prefix = batch.sequences.prefix(batch.rows[b], self.tree.tokens[b, path[1:]])
        if rule.code is not None and len(path) == 1:
            rule.code.forget_before(row, prefix.shape[1])
        scores = rule.processing.row_scores(lambda _: prefix, self.logits[b, node : node + 1], [row], rule.code)
        self._scores[b, node] = scores[0]
        noise = None if self.noise is None else self.noise[b, len(path) - 1 : len(path)]
        return int(rule.choose(scores, noise))
