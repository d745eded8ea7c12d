"""Acceptance that asks the target only where the text goes: from the root down, one node of a row after another.

`acceptance.accept_chosen` wants the target's token after every node of a tree, of which the text passes a few. Where
that token is dear (processors that look at each node's own prefix), going down is cheaper, and what is accepted is the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..drafting.draft_tree import DraftTree
from .acceptance import Acceptance

# Rows and the nodes each has accepted, from the root down, to the target's tokens after the last of them.
Choose = Callable[[Sequence[int], Sequence[list[int]]], list[int]]
# Whether the text of a row ends with this token after that many accepted nodes.
Ends = Callable[[int, int, int], bool]


def accept_tree_walk(tree: DraftTree, choose: Choose, rows: Sequence[int], ends: Ends | None = None) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent. Waits for the device.

    Args:
        tree: drafts of the round.
        choose: asked once per level, for all rows that still go down.
        rows: that are asked about; of the others nothing but the root is accepted, with a bonus of 0.
        ends: after the end of a row's text nothing more is asked about it; the last token is then its bonus, drafted or
            not. `None`: whoever writes the text cuts it.
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
