"""What the target makes of a round's drafts: read back from a graph, or found by eager code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree
from ..drafting.host_numbers import on_device
from ..sampling.acceptance import accept_paths
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
        """What is accepted. Waits for the device once, and for each level of a rule whose processors look at prefixes.

        Args:
            is_broken: `(B, 1)` whether the drafter's scores are no numbers; `None`: it has made no draft.
        """
        known: list[int] = []
        asked: list[ChoiceRule] = []
        choice = self.tree.tokens  # of rows that are asked it means nothing
        found: NodeScores = self._scores
        for rule in self.batch.rules:
            scores = self._score_all_nodes(rule)
            if scores is None:
                asked.append(rule)
            else:
                known += rule.places
                choice, found = rule.put(self._choose_at_all_nodes(rule, scores), choice), scores
        numbers = [choice, self.tree.tokens, self.tree.parents]
        if is_broken is not None:
            numbers.append(is_broken.expand_as(choice))
        table = torch.stack(numbers, dim=1).tolist()
        choices, tokens, parents = ([row[kind] for row in table] for kind in range(3))

        def choose(walking: Mapping[int, list[int]]) -> list[int]:
            return [choices[b][path[-1]] for b, path in walking.items()]

        longest = self.tree.max_depth + 1
        walks = {b: ([0], 0) for b in range(len(table))}
        walks |= accept_paths(known, tokens, parents, choose, longest)
        for rule in asked:
            live = [b for b in rule.places if b in self.batch.live]
            walks |= accept_paths(live, tokens, parents, partial(self._ask, rule), longest, rule.ends)
        new = [[*(tokens[b][node] for node in path[1:]), bonus] for b, (path, bonus) in walks.items()]
        broken = is_broken is not None and any(row[3][0] for row in table)
        return Accepted([path for path, _ in walks.values()], new, broken, found)

    # --- at all nodes at once ------------------------------------------------------------------------------------

    def _score_all_nodes(self, rule: ChoiceRule) -> Tensor | None:
        """What the target decides by, `(R, N, V)`: processed scores, or the raw logits where arg-max needs no more.

        `None` where processors want to see each prefix. On a CPU a repetition penalty does, too: to penalize the few
        tokens that are asked about takes less there than a mask over all.
        """
        processing, choosing, tree = rule.processing, self.batch.choosing, self.tree
        if rule.code is not None and rule.code.why:
            return None
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

    def _ask(self, rule: ChoiceRule, walking: Mapping[int, list[int]]) -> list[int]:
        """By row, nodes from the root down, of all rows as many, to the target's tokens after them."""
        batch, device, places = self.batch, self.logits.device, list(walking)
        index, paths = on_device(places, device), on_device(list(walking.values()), device)  # (R,), (R, n)
        drafted = self.tree.tokens[index[:, None], paths[:, 1:]]
        prefixes = [batch.sequences.prefix(batch.rows[b], own) for b, own in zip(places, drafted, strict=True)]
        rows, depth = [rule.rows[b] for b in places], drafted.shape[1]
        code, length = rule.code, prefixes[0].shape[1]
        if code is not None and not depth:
            code.forget_before(length)
        logits = self.logits[index, paths[:, -1]]
        scores = rule.processing.row_scores(lambda i: prefixes[i], logits, rows, rule.code)  # (R, V)
        self._scores |= {(b, walking[b][-1]): own for b, own in zip(places, scores, strict=True)}
        if code is not None and rule.draws and not code.is_followed(length, asked=True):
            return code.draw(length, scores).tolist()
        noise = None if self.noise is None else self.noise[index, depth]
        return rule.choose(scores, noise).tolist()
