"""Lossless acceptance: a draft is kept while it is what the target chooses.

Greedy, the target chooses its arg-max; sampling, `draw.choose` by the noise of the position, which no draft can change.
So one rule serves chains, trees, prompt lookup and grammars, and the text never depends on what was drafted.

`accept_chosen` wants the target's token after every node, of which the text passes a few, and waits for no device.
Where that token is dear (processors that look at each node's own prefix), `accept_tree_walk` goes down from the root,
one node of a row after another; what is accepted is the same.

`B` batch, `N` nodes with the root, `D` longest path without the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree

# Rows and the nodes each has accepted, from the root down, to the target's tokens after the last of them.
Choose = Callable[[Sequence[int], Sequence[list[int]]], list[int]]
# Whether the text of a row ends with this token after that many accepted nodes.
Ends = Callable[[int, int, int], bool]


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


# --- from the root down ----------------------------------------------------------------------------------------------


def accept_tree_walk(tree: DraftTree, choose: Choose, rows: Sequence[int], ends: Ends | None = None) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent. Waits for the device.

    Args:
        tree: drafts of the round.
        choose: asked once per level, for all rows that still go down.
        rows: that are asked about; of the others nothing but the root is accepted, with a bonus of 0.
        ends: after the end of a row's text nothing more is asked about it; the last token is then its bonus, drafted or
            not. `None`: the text is cut when it is written.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    longest, device = tree.max_depth + 1, tree.tokens.device
    paths, bonus, walking = [[0] for _ in tokens], [0] * len(tokens), list(rows)
    while walking:
        chosen = choose(walking, [paths[row] for row in walking])
        further = []
        for row, token in zip(walking, chosen, strict=True):
            is_last = ends is not None and ends(row, len(paths[row]), token)
            child = None if is_last else _child(parents[row], tokens[row], paths[row][-1], token)
            if child is None or len(paths[row]) == longest:  # deeper nodes are not valid
                bonus[row] = token
            else:
                paths[row].append(child)
                further.append(row)
        walking = further
    return Acceptance(
        path=torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device),
        length=torch.tensor([len(path) for path in paths], device=device),
        bonus=torch.tensor(bonus, device=device),
        best=torch.tensor([path[-1] for path in paths], device=device),
    )


def _child(parents: Sequence[int], tokens: Sequence[int], node: int, token: int) -> int | None:
    """The child of a node that holds this token; children come after their parent."""
    below = range(node + 1, len(tokens))
    return next((child for child in below if parents[child] == node and tokens[child] == token), None)
