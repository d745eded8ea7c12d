"""Which tokens a text has already, as masks over the vocabulary: all that a repetition penalty asks of a text.

With masks it is asked of all nodes of a round at once, and on a device, where asking node by node waits for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafting.host_numbers import on_device


class SeenTokens:
    """A mask for each row of a batch, kept up to date as rows are written.

    Args:
        prompts: ids `(B, L)`.
        vocabulary: scores of a token; ids beyond, which a prompt may have, are nothing that could be written.
        ignored: how many tokens of each row, from its first pad on, do not count.
    """

    def __init__(self, prompts: Tensor, vocabulary: int, ignored: Sequence[int]):
        place = torch.arange(prompts.shape[1], device=prompts.device)
        is_ignored = place < on_device(ignored, prompts.device)[:, None]
        self._prompts = prompts.clamp(max=vocabulary).masked_fill(is_ignored, vocabulary)
        self._ignored = [max(count - prompts.shape[1], 0) for count in ignored]  # of what is written behind
        self._seen = torch.zeros(len(prompts), vocabulary + 1, dtype=torch.bool, device=prompts.device)
        self._counted = [0] * len(prompts)
        self._seen.scatter_(1, self._prompts, True)

    def of(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """`(len(rows), V)`: which tokens these rows have.

        Args:
            new: of all rows, their tokens behind the prompts. They may have become fewer, if a round is repeated.
        """
        for row in rows:
            if len(new[row]) < self._counted[row]:
                self._counted[row] = 0
                self._seen[row] = False
                self._seen[row, self._prompts[row]] = True
        fresh = [(row, token) for row in rows for token in new[row][max(self._counted[row], self._ignored[row]) :]]
        if fresh:
            at = on_device(fresh, self._seen.device).T
            self._seen[at[0], at[1]] = True
        for row in rows:
            self._counted[row] = len(new[row])
        everyone = list(rows) == list(range(len(self._seen)))
        seen = self._seen if everyone else self._seen[on_device(list(rows), self._seen.device)]
        return seen[:, :-1]


def seen_at_nodes(seen: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensor:
    """`(B, N, V)`: which tokens the text through each node has.

    Args:
        seen: `(B, V)` of the text through the root.
        tokens: `(B, N)` of the nodes.
        ancestors: `(B, N, N)`; `[b, i, j]` true where node `j` is `i` or above it.
    """
    above = torch.where(ancestors, tokens[:, None], tokens[:, :, None])  # its own token in place of what is not above
    return seen[:, None].repeat(1, tokens.shape[1], 1).scatter_(2, above, True)


def seen_after(seen: Tensor, tokens: Tensor, count: Tensor, bonus: Tensor) -> Tensor:
    """`(B, V)`: which tokens a text has once the first `count (B,)` of `tokens (B, W)`, and then `bonus (B,)`, are
    written behind what was `seen`."""
    is_written = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    written = torch.where(is_written, tokens, bonus[:, None])
    return seen.scatter(1, torch.cat((written, bonus[:, None]), dim=1), True)


def penalize(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores `(..., V)` as transformers' repetition penalty makes them where a token was `seen (..., V)`."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
