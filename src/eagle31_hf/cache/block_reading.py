"""How layers with states read a placed block. Attention needs none of this: masks hide what a token must not see.

A recurrent layer has no mask. What it reads is in its state for good, so it must be told which tokens are pads, and
whether some of them may be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trees.host_numbers import on_device
from .slot_moves import DeviceCopies


@dataclass(frozen=True)
class BlockReading:
    """The default reads a chunk of a prompt: all of it, of all rows, to be kept as a whole.

    Attributes:
        counts: tokens of each row, what follows in it are pads; `None`: there are none.
        is_draft: any number of the tokens may be kept. Several are read as a chain, which is recorded.
    """

    counts: Sequence[int] | None = None
    is_draft: bool = False

    @classmethod
    def of_drafts(cls) -> BlockReading:
        """A chain, of which each row keeps some tokens."""
        return cls(is_draft=True)


WHOLE = BlockReading()


@dataclass(frozen=True)
class RowGroup:
    """Rows that a mixer reads in one call: they have as many tokens each, and all of them have a state or none has.

    Attributes:
        count: tokens of each.
        begins: whether they have no state yet.
        index: the rows, as one tensor on every device; `None`: all there are.
    """

    count: int
    begins: bool
    index: DeviceCopies | None = None

    def rows_on(self, device: torch.device) -> Tensor | None:
        """The rows `(G,)` there; `None`: all."""
        return None if self.index is None else self.index.on(device)[0]


def row_groups(
    lengths: Sequence[int], num_tokens: int, counts: Sequence[int] | None, device: torch.device
) -> list[RowGroup]:  # fmt: skip
    """The groups of rows with `lengths` committed tokens that read a block; rows without a token are in none."""
    tokens = [num_tokens] * len(lengths) if counts is None else counts
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, (count, length) in enumerate(zip(tokens, lengths, strict=True)):
        if count:
            groups.setdefault((count, length == 0), []).append(row)
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(lengths):
        return [RowGroup(*key) for key in groups]
    return [RowGroup(*key, DeviceCopies(on_device(rows, device))) for key, rows in groups.items()]
