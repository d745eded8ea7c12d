"""Lossless acceptance: a draft is kept while it is what the target chooses.

Greedy, the target chooses its arg-max; sampling, `draw.choose` by the noise of the position, which no draft can change.
So one rule serves chains, trees, prompt lookup and grammars, and the text never depends on what was drafted.

`accept_paths` goes down the rows' trees on the host, and asks for the target's tokens where the texts go. Graphs find
the same in tensors, without a wait for the device: `accept_chosen` in trees, `match_prefix` in chains, by the target's
token after every node.

`B` batch, `N` nodes with the root, `D` longest path without the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree


def accept_paths(
    rows: Iterable[int],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    choose: Callable[[dict[int, list[int]]], Sequence[int]],
    longest: int,
    ends: Callable[[int, int, int], bool] | None = None,
) -> dict[int, tuple[list[int], int]]:
    """Of each row the longest path whose every token is what the target chose at its parent, and its token after it.

    Args:
        rows: that are walked down together, a level at a time.
        tokens, parents: of the nodes of each row of the batch.
        choose: by row, nodes from the root down, to what the target chooses after them.
        longest: nodes of a path, at most: deeper ones are not valid.
        ends: whether a row's text ends with a token after so many accepted nodes: it is then the last one, drafted or
            not. `None`: the text is cut when it is written.
    """
    walking, found = {row: [0] for row in rows}, {}
    while walking:
        for (row, path), token in zip(list(walking.items()), choose(walking), strict=True):
            is_last = len(path) == longest or (ends is not None and ends(row, len(path), token))
            below = () if is_last else range(path[-1] + 1, len(tokens[row]))  # children come after their parent
            children = (node for node in below if parents[row][node] == path[-1] and tokens[row][node] == token)
            if (child := next(children, None)) is None:
                found[row] = walking.pop(row), token
            else:
                path.append(child)
    return found


# --- in graphs --------------------------------------------------------------------------------------------------------


class Acceptance(NamedTuple):
    """What one round yields.

    Attributes:
        path: `(B, D+1)` accepted nodes from the root down; entries from `length` on are padding: valid node numbers
            that mean nothing.
        length: `(B,)` accepted nodes, root included.
        bonus: `(B,)` the token the target adds after the last accepted node, the next round's root.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor

    def along(self, states: Tensor) -> Tensor:
        """Of the nodes' states `(B, N, X)` those of each path's nodes, `(B, D+1, X)`."""
        return states.gather(1, self.path[:, :, None].expand(-1, -1, states.shape[-1]))


def for_host(acceptance: Acceptance, tokens: Tensor, is_broken: Tensor) -> Tensor:
    """What the host wants to know of a round, `(B, 3 + 2*(D+1))`: the round's one copy.

    Args:
        acceptance: of the drafts.
        tokens: `(B, D+1)` of the path.
        is_broken: `()` whether the drafter's scores are no numbers.
    """
    columns = (is_broken.expand_as(acceptance.length), acceptance.length, acceptance.bonus)
    return torch.cat((*(column[:, None] for column in columns), acceptance.path, tokens), dim=1)


def match_prefix(tokens: Tensor, target_choice: Tensor) -> tuple[Tensor, Tensor]:
    """Of chains `tokens (B, N)` the last accepted node and the bonus, `(B,)` each.

    Args:
        target_choice: `(B, N)` the target's token after each node.
    """
    matches = tokens[:, 1:] == target_choice[:, :-1]
    best = matches.cumprod(1).sum(1)
    return best, target_choice.gather(1, best[:, None]).squeeze(1)


def accept_chosen(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent.

    Args:
        tree: drafts of the round.
        target_choice: `(B, N)` the target's token after each node.
    """
    mismatch = tree.tokens != target_choice.gather(1, tree.parents)  # (B, N)
    # A node is refused if any node above it, itself included but not the root, is not what the target chose.
    refused = (tree.ancestors[:, :, 1:] & mismatch[:, None, 1:]).any(2)
    best = tree.depths.masked_fill(refused, -1).argmax(1)
    on_path = tree.ancestors.gather(1, best[:, None, None].expand(-1, 1, tree.size)).squeeze(1)  # (B, N)
    # A path holds one node per depth, so depth is the slot; everything off the path lands in a spare last slot.
    slots = torch.where(on_path, tree.depths, tree.max_depth + 1)
    numbers = torch.arange(tree.size, device=best.device).expand_as(slots)
    path = numbers.new_zeros(len(slots), tree.max_depth + 2).scatter_(1, slots, numbers)[:, :-1]
    return Acceptance(path, on_path.sum(1), target_choice.gather(1, best[:, None]).squeeze(1))
