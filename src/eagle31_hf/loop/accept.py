"""What the target makes of a round's drafts, by eager code: at all nodes at once, or at those the text passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree
from ..drafting.host_numbers import on_device
from ..sampling.acceptance import Acceptance, accept_chosen, accept_tree_walk, for_host
from ..sampling.seen_tokens import seen_at_nodes
from .choosing import ChoiceRule, RoundBatch

# Processed scores (V,) of a node, by (row of the caches, node); or of all nodes, (B, N, V).
NodeScores = Tensor | Mapping[tuple[int, int], Tensor]


class Accepted(NamedTuple):
    """What the target accepts of a tree.

    Attributes:
        tree: the drafts.
        acceptance: of them.
        scores: processed ones of the accepted nodes, where they are wanted (raw logits where nothing changes them).
        for_host: what the host reads of it (`acceptance.for_host`), where a graph has put that together; `None` if
            `acceptance` was changed since.
    """

    tree: DraftTree
    acceptance: Acceptance
    scores: NodeScores
    for_host: Tensor | None = None


class Acceptor:
    """Acceptance of one round's drafts: what the target chooses is kept.

    Processors that look at prefixes are asked only where the text goes.

    Args:
        tree: drafts.
        logits: the target's `(B, N, V)`.
        batch: the rows.
    """

    def __init__(self, tree: DraftTree, logits: Tensor, batch: RoundBatch):
        self.tree, self.logits, self.batch = tree, logits, batch
        self.host_sync_is_free = tree.tokens.device.type == "cpu"
        self.noise = batch.choosing.noise_for(batch, tree.max_depth + 1)  # (B, D + 1, V)
        self._scores: dict[tuple[int, int], Tensor] = {}  # processed ones of the nodes that were asked about alone

    def accept(self) -> Accepted:
        """What is accepted, and its scores."""
        scored = [self._score_all_nodes(rule) for rule in self.batch.rules]
        chosen = [
            None if scores is None else self._choose_at_all_nodes(rule, scores)
            for rule, scores in zip(self.batch.rules, scored, strict=True)
        ]
        at_once = [choice for choice in chosen if choice is not None]
        if len(at_once) < len(chosen):
            return Accepted(self.tree, self._walk_down(chosen), self._scores)
        acceptance = self._accept_chosen(_joined(self.batch.rules, at_once))
        return Accepted(self.tree, acceptance, scored[0] if len(scored) == 1 and scored[0] is not None else {})

    # --- at all nodes at once ------------------------------------------------------------------------------------

    def _score_all_nodes(self, rule: ChoiceRule) -> Tensor | None:
        """What the target decides by, `(R, N, V)`: processed scores, or the raw logits where arg-max needs no more.

        `None` where processors want to see each prefix. On a CPU a repetition penalty does, too: to penalize the few
        tokens that are asked about takes less there than a mask over all.
        """
        processing, choosing = rule.processing, self.batch.choosing
        if not processing.scores_only:
            asks_host = self.host_sync_is_free or not processing.warps_drafts
            seen = None if asks_host else choosing.seen_before(self.batch)
            if seen is None:
                return None
            at_nodes = seen_at_nodes(rule.of(seen), rule.of(self.tree.tokens), rule.of(self.tree.ancestors))
            return processing.draft_warping.of_nodes(rule.of(self.logits), at_nodes)
        if processing.is_empty and not rule.draws and not choosing.wants_scores:
            return rule.of(self.logits)
        return processing.draft_warping.of_nodes(rule.of(self.logits))

    def _choose_at_all_nodes(self, rule: ChoiceRule, scores: Tensor) -> Tensor:
        """The target's token after every node, `(R, N)`."""
        if self.noise is None or not rule.draws:
            return rule.choose(scores, None)
        noise = rule.of(self.noise)
        if not self.tree.is_chain:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            noise = noise[rows, rule.of(self.tree.positions)]
        return rule.choose(scores, noise)

    def _accept_chosen(self, choice: Tensor) -> Acceptance:
        if self.tree.is_chain or not self.host_sync_is_free:
            return accept_chosen(self.tree, choice)
        chosen = choice.tolist()  # a walk over lists takes less than half of what a CPU needs for 20 operations
        return accept_tree_walk(
            self.tree,
            lambda rows, paths: [chosen[b][p[-1]] for b, p in zip(rows, paths, strict=True)],
            self.batch.live,
        )

    # --- where the text goes -------------------------------------------------------------------------------------

    def _walk_down(self, chosen: Sequence[Tensor | None]) -> Acceptance:
        """By the target's tokens after all nodes of each rule's rows, `(R, N)`; `None` where it is to be asked."""
        known: dict[int, list[int]] = {}
        rule_of = {b: rule for rule in self.batch.rules for b in rule.places}
        for rule, choice in zip(self.batch.rules, chosen, strict=True):
            known |= {} if choice is None else dict(zip(rule.places, choice.tolist(), strict=True))

        def choose_after(walking: Sequence[int], paths: Sequence[list[int]]) -> list[int]:
            path_of = dict(zip(walking, paths, strict=True))
            tokens = {b: known[b][path[-1]] for b, path in path_of.items() if b in known}
            for rule in self.batch.rules:
                asked = {b: path for b, path in path_of.items() if b not in known and rule_of[b] is rule}
                tokens |= self._ask(rule, asked) if asked else {}
            return [tokens[b] for b in walking]

        def ends(b: int, nodes: int, token: int) -> bool:
            return b not in known and (ends := rule_of[b].ends) is not None and ends(b, nodes, token)

        return accept_tree_walk(self.tree, choose_after, self.batch.live, ends)

    def _ask(self, rule: ChoiceRule, paths: dict[int, list[int]]) -> dict[int, int]:
        """By place, the target's token after the last node of each path."""
        batch, tokens, places = self.batch, self.tree.tokens, list(paths)
        nodes, depths = [path[-1] for path in paths.values()], [len(path) - 1 for path in paths.values()]
        prefixes = [batch.sequences.prefix(batch.rows[b], tokens[b, path[1:]]) for b, path in paths.items()]
        rows = [rule.rows[b] for b in places]
        if rule.code is not None and not any(depths):
            for row, prefix in zip(rows, prefixes, strict=True):
                rule.code.forget_before(row, prefix.shape[1])
        logits = self.logits[places, nodes]
        scores = rule.processing.row_scores(lambda i: prefixes[i], logits, rows, rule.code)  # (R, V)
        self._scores |= zip(zip(places, nodes, strict=True), scores, strict=True)
        noise = None if self.noise is None else self.noise[places, depths]
        return dict(zip(places, rule.choose(scores, noise).tolist(), strict=True))


def _joined(rules: Sequence[ChoiceRule], chosen: Sequence[Tensor]) -> Tensor:
    """`(B, N)` of all rows, of `(R, N)` of each rule's."""
    if len(rules) == 1:
        return chosen[0]
    order = [place for rule in rules for place in rule.places]
    return torch.cat(list(chosen))[on_device([order.index(b) for b in range(len(order))], chosen[0].device)]


def sync_accepted(accepted: Accepted, is_broken: Callable[[], Tensor]) -> tuple[list[list[int]], list[list[int]], bool]:
    """The round's one wait for the device.

    Args:
        accepted: by the target.
        is_broken: asked where no graph has said it: `()` whether the drafter's scores are no numbers.

    Returns:
        Accepted nodes and new tokens of each row, past the row's end too; whether what the drafter made is of no use.
    """
    tree, acceptance, _, packed = accepted
    if packed is None:
        packed = for_host(acceptance, tree.tokens, is_broken())
    table = packed.tolist()
    paths: list[list[int]] = []
    emitted: list[list[int]] = []
    for _, count, bonus, *rest in table:
        nodes, tokens = rest[:count], rest[acceptance.path.shape[1] :]
        paths.append(nodes)
        emitted.append([*(tokens[node] for node in nodes[1:]), bonus])
    return paths, emitted, any(row[0] for row in table)
