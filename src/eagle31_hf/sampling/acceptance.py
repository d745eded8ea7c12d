"""Lossless acceptance: a draft is kept while it is what the target chooses. Pure; nothing waits for the device.

Greedy, the target chooses its arg-max; sampling, `draw.choose` by the noise of the position, which no draft can change.
So one rule serves chains, trees, prompt lookup and grammars, and the text never depends on what was drafted.

`B` batch, `N` nodes with the root, `D` longest path without the root.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree


class Acceptance(NamedTuple):
    """What one round yields.

    Attributes:
        path: `(B, D+1)` accepted nodes from the root down; entries from `length` on are padding: valid node numbers
            that mean nothing.
        length: `(B,)` accepted nodes, root included.
        bonus: `(B,)` the token the target adds after the last accepted node, the next round's root.
        best: `(B,)` last accepted node.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    best: Tensor

    def along(self, states: Tensor, width: int | None = None) -> Tensor:
        """Of the nodes' states `(B, N, X)` those of the first `width` nodes of each path, `(B, width, X)`."""
        nodes = self.path[:, :width, None]
        return states.gather(1, nodes.expand(-1, -1, states.shape[-1]))


def for_host(acceptance: Acceptance, tokens: Tensor, is_broken: Tensor) -> Tensor:
    """What the host wants to know of a round, `(B, 3 + D+1 + N)`: the round's one copy.

    Args:
        acceptance: of the drafts.
        tokens: `(B, N)` of the nodes.
        is_broken: `()` or `(B,)` whether the drafter's scores are no numbers.
    """
    columns = (is_broken.expand_as(acceptance.length), acceptance.length, acceptance.bonus)
    return torch.cat((*(column[:, None] for column in columns), acceptance.path, tokens), dim=1)


def accept_chosen(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent.

    Args:
        tree: drafts of the round.
        target_choice: `(B, N)` the target's token after each node.
    """
    return _follow_chain(tree, target_choice) if tree.is_chain else _follow_tree(tree, target_choice)


def _follow_chain(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    if tree.size == 1:
        return chain_acceptance(tree, tree.depths[:, 0], target_choice[:, 0])
    return chain_acceptance(tree, *match_prefix(tree.tokens, target_choice))


def match_prefix(tokens: Tensor, target_choice: Tensor) -> tuple[Tensor, Tensor]:
    """`accept_chosen` of a chain on tensors alone: the last accepted node and the bonus, `(B,)` each."""
    matches = tokens[:, 1:] == target_choice[:, :-1]
    best = matches.cumprod(1).sum(1)
    return best, target_choice.gather(1, best[:, None]).squeeze(1)


def chain_acceptance(tree: DraftTree, best: Tensor, bonus: Tensor) -> Acceptance:
    """A chain accepted down to node `best (B,)`, with the token `bonus (B,)` after it."""
    return Acceptance(path=tree.depths, length=best + 1, bonus=bonus, best=best)  # in a chain, node = depth


def _follow_tree(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    mismatch = tree.tokens != target_choice.gather(1, tree.parents)  # (B, N)
    # A node is refused if any node above it, itself included but not the root, is not what the target chose.
    refused = (tree.ancestors[:, :, 1:] & mismatch[:, None, 1:]).any(2)
    if tree.valid is not None:
        refused |= ~tree.valid
    best = tree.depths.masked_fill(refused, -1).argmax(1)
    path, length = tree.path_to(best)
    return Acceptance(path, length, target_choice.gather(1, best[:, None]).squeeze(1), best)
