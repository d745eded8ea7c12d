"""What the rows of a cache hold for good, where the running forward writes, and how layers with states read it.

Attention needs none of the last: masks hide what a token must not see. A recurrent layer has no mask, and what it reads
is in its state for good, so it needs to know which tokens are pads, and whether some of them may be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafting.host_numbers import on_device
from ..errors import UnsupportedGenerationError
from .slot_moves import DeviceCopies


@dataclass(frozen=True)
class RowGroup:
    """Rows that a mixer reads in one call: they have as many tokens each.

    Attributes:
        count: tokens of each.
        index: the rows, as one tensor on every device; `None`: all there are.
    """

    count: int
    index: DeviceCopies | None = None

    def rows_on(self, device: torch.device) -> Tensor | None:
        """The rows `(G,)` there; `None`: all."""
        return None if self.index is None else self.index.on(device)[0]


def row_groups(counts: Sequence[int], device: torch.device) -> list[RowGroup]:
    """The groups of rows that read so many tokens; rows that read none are in none."""
    if len(set(counts)) == 1 and counts[0]:
        return [RowGroup(counts[0])]
    groups: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        if count:
            groups.setdefault(count, []).append(row)
    return [RowGroup(count, DeviceCopies(on_device(rows, device))) for count, rows in groups.items()]


class Placement:
    """Committed lengths and the placed block, shared by the layers and masks of one cache.

    Slots are counted as layers without a window have them: token `p` of a row lies in slot `p`.

    Args:
        batch_size: rows `B`, all empty.
        block: most tokens written between two commits.
        device: where masks and positions live.
    """

    def __init__(self, batch_size: int, block: int, device: torch.device):
        self.block, self.device = block, device
        self.reserved_slots = 0  # slots a full layer must own
        self.reserved_rows = batch_size  # rows that new buffers have, of which the first are live
        self.row_changes = 0  # how often rows have joined, left or changed places
        self.set_rows([0] * batch_size)

    def set_rows(self, lengths: list[int]) -> None:
        """Other rows than before, of so many tokens."""
        self.row_changes += 1
        self._lengths_tensor = torch.zeros(len(lengths), dtype=torch.long, device=self.device)
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Committed tokens of each row from now on."""
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.rows_alike = min(lengths, default=0) == self.longest
        self._mirrored = False
        self.clear()

    @property
    def lengths_tensor(self) -> Tensor:
        """`lengths` on the device, `(B,)`, rewritten in place where it is read: rounds by graphs do not."""
        if not self._mirrored:
            if self.rows_alike:
                self._lengths_tensor.fill_(self.longest)
            else:
                # CUDA stages pageable memory before it returns, so this waits for nothing and the source may go.
                self._lengths_tensor.copy_(torch.tensor(self.lengths), non_blocking=self.device.type == "cuda")
            self._mirrored = True
        return self._lengths_tensor

    def clear(self) -> None:
        """Nothing is placed."""
        self.num_tokens = 0  # 0: nothing placed
        self.after = 0  # block nodes already written by earlier forwards of this round
        self._slots: DeviceCopies | None = None
        self.counts: Sequence[int] = ()  # tokens of each row that layers with states read, as are these:
        self.is_draft = False
        self.groups: list[RowGroup] = []

    def place(self, num_tokens: int, after: int) -> None:
        """So many tokens of each row, behind nodes of earlier forwards."""
        self.num_tokens, self.after, self._slots = num_tokens, after, None

    @property
    def start(self) -> int | None:
        """First slot that is written where rows are of equal length; `None`: see `slots`."""
        return self.longest + self.after if self.rows_alike else None

    @property
    def visible_slots(self) -> int:
        """How many slots, from the first on, take part in attention."""
        return self.longest + self.block_end

    @property
    def slots(self) -> DeviceCopies:
        """Rows `(B, 1)` and slots `(B, T)` of the placed tokens, made where a layer asks: graphs have their own."""
        if self._slots is None:
            rows = torch.arange(self.batch_size, device=self.device)[:, None]
            self._slots = DeviceCopies(rows, self.chain_slots)
        return self._slots

    def read_states(self, counts: Sequence[int] | None, *, is_draft: bool) -> None:
        """Say how layers with states read the placed block; see `SpeculativeCache.place`."""
        self.counts, self.is_draft = counts or [self.num_tokens] * self.batch_size, is_draft
        self.groups = row_groups(self.counts, self.device)
        assert self.begins or min(self.lengths), "rows begin together"
        assert not (self.is_chain and self.begins), "layers with states read a part of the text before the first drafts"

    @property
    def begins(self) -> bool:
        """Whether no row has a state yet."""
        return not self.longest

    @property
    def is_chain(self) -> bool:
        """Whether layers with states record what they read, since any number of it may be kept."""
        return self.is_draft and self.num_tokens > 1

    def last_state_nodes(self, kept: Sequence[Sequence[int]]) -> list[int]:
        """Of each row the token whose states become the row's own, -1 where it stands still."""
        if self.is_draft:
            in_order = all(list(row) == list(range(len(row))) for row in kept)
            assert in_order, f"got {kept} to keep of a chain; layers with states keep its first tokens, in order"
            return [len(row) - 1 for row in kept]
        whole = all(len(row) in (0, count) for row, count in zip(kept, self.counts, strict=True))
        assert whole, f"got {kept} to keep of a block that layers with states have read to its end"
        return [0 if len(row) else -1 for row in kept]

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def block_end(self) -> int:
        """Nodes of the block so far, the placed ones included."""
        return self.after + self.num_tokens

    @property
    def block_slots(self) -> int:
        """Slots behind its ring that take part in attention where a layer sees a window."""
        return self.block_end

    @property
    def chain_slots(self) -> Tensor:
        """Slots `(B, T)` of the placed tokens."""
        return self.lengths_tensor[:, None] + torch.arange(self.after, self.block_end, device=self.device)

    def check(self, batch_size: int, num_tokens: int) -> None:
        """Raise an `UnsupportedGenerationError` unless so many rows of so many tokens are placed."""
        if num_tokens != self.num_tokens or batch_size != len(self.lengths):
            placed = f"{self.batch_size} rows of {self.num_tokens} tokens" if self.num_tokens else "nothing"
            raise UnsupportedGenerationError(
                f"a forward wrote {batch_size} rows of {num_tokens} tokens, but {placed} had been placed; call "
                "`cache.place(num_tokens)` before each forward"
            )
