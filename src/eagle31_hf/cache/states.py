"""Recurrent and convolution states of one layer: one of each kind per row, however long the row is.

    committed          (B, ...)      what each row's kept tokens left behind
    after              (B, ...)      what a chunk of a prompt, or a single token, leaves behind it
    windows, records                 what a chain of drafts leaves, by which the state after any of its tokens follows
                                     (`state_tape`)

A mixer is never handed a committed state: kernels for one token write in place. It gets a copy, and leaves there what
follows. `settle_states` makes the states after each row's last kept token the committed ones, so a rejected token
leaves no trace, and neither does a forward that fails half-way.

A mixer's call begins with `begin` and ends with `end`; the states that it asks for in between are its own. A state that
is written in a block by no mixer is an error: the text would silently be another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ..errors import IncompatibleTargetError
from .layers import SlotLayer
from .placement import Placement, RowGroup
from .state_tape import LastNodes, Moves, Recorded, make_moves, moved_windows, rebuilt_states

CONVOLUTION, RECURRENT = "conv_states", "recurrent_states"
StateKey = tuple[str, int]
"""Kind and number of a state: a layer may have several of a kind."""


class BlockTrace(NamedTuple):
    """What a block left in one layer, by which its states can be moved on, as tuples that a graph may give.

    Attributes:
        after: states after a chunk of a prompt or a single token, `(B, ...)`, in one order always.
        windows: convolutions' windows and a chain's columns behind them, `(B, C, K + T)`.
        recorded: what a chain's recurrence was given; `None` without one.
    """

    after: tuple[tuple[StateKey, Tensor], ...]
    windows: tuple[tuple[StateKey, Tensor], ...]
    recorded: Recorded | None


class StateLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[misc]
    """A layer of states, and of keys and values beside them where it attends, too.

    What mixers call (`update_conv_state`, `update_recurrent_state`) is transformers' own code over the states handed
    out: mixers of some versions read `conv_states` and `recurrent_states` themselves.
    """

    conv_states: MutableMapping[int, Tensor | None]  # type: ignore[assignment]
    recurrent_states: MutableMapping[int, Tensor | None]  # type: ignore[assignment]
    is_compileable = False  # type: ignore[assignment]
    is_croppable = False  # type: ignore[assignment]

    def __init__(
        self, placement: Placement, ring: int | None, *, in_eight_bits: bool = False, num_states: int, index: int
    ):
        SlotLayer.__init__(self, placement, ring, in_eight_bits=in_eight_bits)
        LinearAttentionLayer.__init__(self, number_of_states=num_states)
        self.index = index
        self.conv_states = _HandedOut(self, CONVOLUTION)
        self.recurrent_states = _HandedOut(self, RECURRENT)
        self.make_state: Callable[[StateKey, Tensor], Tensor] = lambda _, like: like.new_zeros(like.shape)
        self._committed: dict[StateKey, Tensor] = {}
        self._after: dict[StateKey, Tensor] = {}
        self._written: set[tuple[StateKey, RowGroup]] = set()  # by the placed block, of rows that are read together
        self._reads: RowGroup | None = None  # by the mixer that runs
        self._open: dict[StateKey, Tensor] = {}
        self._windows: dict[StateKey, Tensor] = {}  # (B, C, K + T): convolutions' windows and the chain behind them
        self._recorded: Recorded | None = None  # of the layer's one recurrence

    # One block ------------------------------------------------------------------------------------------------------

    def forget_block(self) -> None:
        """A new block is placed: what the last one left was committed, or is not wanted."""
        self._written.clear()
        self._reads, self._recorded = None, None
        self._open, self._windows = {}, {}

    def begin(self, rows: RowGroup) -> None:
        """A mixer is about to read its tokens of these rows."""
        self._reads, self._open = rows, {}
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), not self.placement.begins)

    def end(self, recorded: Recorded | None = None) -> None:
        """The mixer has left the states behind its tokens or, of a chain, what is `recorded` of it."""
        assert self._reads is not None, "begin() comes before end()"
        if recorded is not None:
            self._written.add(((RECURRENT, 0), self._reads))
            self._recorded = recorded
        for key, state in {} if self.placement.is_chain else self._open.items():
            self._written.add((key, self._reads))
            rows = self._reads.rows_on(state.device)
            if rows is not None:
                self._after[key].index_copy_(0, rows, state)
        self._reads, self._open = None, {}

    def handed_out(self, key: StateKey) -> Tensor | None:
        """The state a mixer reads and writes: a copy of what its call continues."""
        if key in self._open:
            return self._open[key]
        if self._reads is None:
            raise IncompatibleTargetError(
                f"layer {self.index} of the target reads its {key[0]} from a module that was replaced after the "
                "drafter was attached; attach the drafter again"
            )
        if key not in self._committed:
            return None
        live, after = self._live(key), self._room(key)
        rows = self._reads.rows_on(after.device)
        if self.placement.begins:
            self._open[key] = (after if rows is None else after[rows]).zero_()
        else:
            self._open[key] = after.copy_(live) if rows is None else live.index_select(0, rows)
        return self._open[key]

    def _live(self, key: StateKey) -> Tensor:
        state, rows = self._committed[key], self.placement.batch_size
        return state if len(state) == rows else state[:rows]

    def _room(self, key: StateKey) -> Tensor:
        """Where the block's state goes, `(B, ...)`."""
        rows = self.placement.batch_size
        if key not in self._after or len(self._after[key]) < rows:
            self._after.pop(key, None)  # the old one goes before the new one comes
            self._after[key] = torch.empty_like(self._committed[key])
        return self._after[key][:rows]

    @property
    def _all_written(self) -> set[tuple[StateKey, RowGroup]]:
        return {(key, rows) for key in self._committed for rows in self.placement.groups}

    def trace(self) -> BlockTrace:
        """What the placed block has left.

        Raises:
            IncompatibleTargetError: a state was not written.
        """
        missing = sorted({key for key, _ in self._all_written - self._written})
        if missing:
            raise IncompatibleTargetError(
                f"layer {self.index} of the target did not write its states {missing}: a module was replaced after the "
                "drafter was attached; attach the drafter again, or generate without one"
            )
        taped = [*self._windows, *([] if self._recorded is None else [(RECURRENT, 0)])]
        rows = self.placement.batch_size
        after = [(key, self._after[key][:rows]) for key in self._committed if key not in taped]
        return BlockTrace(tuple(after), tuple(self._windows.items()), self._recorded)

    def take_over(self, trace: BlockTrace) -> None:
        """The placed block has left this: another layer, which began with the same states, has read it."""
        self._after.update(trace.after)
        self._windows, self._recorded = dict(trace.windows), trace.recorded
        self._written = self._all_written

    @property
    def committed(self) -> dict[StateKey, Tensor]:
        """What is committed of all rows, where it lies."""
        return {key: self._live(key) for key in self._committed}

    # Called by transformers' own code --------------------------------------------------------------------------------

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """The window before, and what is new, `(B, C, K + T)`."""
        if self._reads is None or not self.placement.is_chain:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        key = (CONVOLUTION, state_idx)
        self._written.add((key, self._reads))
        self._windows[key] = columns = torch.cat((self._live(key), conv_states), dim=-1)
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """The state as it was written; a chain's end is not kept."""
        if self._reads is None or not self.placement.is_chain:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return recurrent_states

    def lazy_initialization(  # type: ignore[override]
        self,
        *keys_and_values: Tensor,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Own what is about to be written first: keys and values, given by position, or a state, given by name."""
        if keys_and_values:
            SlotLayer.lazy_initialization(self, *keys_and_values)
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self._own((CONVOLUTION, state_idx), conv_states.new_empty((*conv_states.shape[:-1], size)))
        if recurrent_states is not None:
            self._own((RECURRENT, state_idx), recurrent_states)

    def _own(self, key: StateKey, like: Tensor) -> None:
        """Hold such a state of every row, empty so far. `like`: `(*, ...)`."""
        rows = self.placement.reserved_rows
        self._hold(key, self.make_state(key, like[:1].expand(rows, *like.shape[1:])))

    def _hold(self, key: StateKey, state: Tensor) -> None:
        (kind, number), self._committed[key] = key, state
        if kind == CONVOLUTION:
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = state.shape[-1]
        else:
            self.is_recurrent_states_initialized[number] = True

    # The rest of what a cache does with it ---------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of what is committed, of what blocks leave, and of what is recorded of the last one."""
        held = [*self._committed.values(), *self._after.values(), *self._windows.values()]
        if self._recorded is not None:
            held += [tensor for tensor in self._recorded.inputs if not isinstance(tensor, nn.Parameter)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return sum(storages.values())  # inputs are views of what the convolution made: that is what stays

    def release_block(self) -> None:
        """Give back what the next block makes again."""
        self._after = {}
        self.forget_block()

    def held_states(self, row: int) -> dict[StateKey, Tensor]:
        """What is committed of one row, `(1, ...)`, as copies."""
        return {key: state[row : row + 1].clone() for key, state in self._committed.items()}

    def load_states(self, states: Mapping[StateKey, Tensor]) -> None:
        """Take over states of all rows."""
        for key, state in states.items():
            if key not in self._committed:
                self._own(key, state)
            self._live(key).copy_(state)

    def adopt_states(self, other: StateLayer) -> None:
        """Have such states, empty, as another cache's layer has."""
        for key, state in other._committed.items():
            if key not in self._committed:
                self._own(key, state)

    @property
    def state_buffers(self) -> list[Tensor]:
        """What is committed of rows, live or not, in one order always: `(reserved rows, ...)` each."""
        return [self._committed[key] for key in sorted(self._committed)]


Block = tuple[Mapping[StateKey, Tensor], BlockTrace]
"""A layer's committed states, and what a block has left in it."""


def state_moves(blocks: Sequence[Block], last: LastNodes) -> Moves:
    """Committed states of layers, each with that after the rows' last kept nodes. Nothing is written."""
    moves = [(committed[key], after) for committed, trace in blocks for key, after in trace.after]
    if last.common is None:
        for number, (state, after) in enumerate(moves):
            keeps = (last.on(state.device) >= 0).view(-1, *[1] * (state.dim() - 1))
            moves[number] = state, torch.where(keeps, after, state)
    windows = [(committed[key], columns) for committed, trace in blocks for key, columns in trace.windows]
    taped = [(committed[RECURRENT, 0], trace.recorded) for committed, trace in blocks if trace.recorded is not None]
    return moves + moved_windows(windows, last) + rebuilt_states(taped, last)


def settle_states(layers: Sequence[StateLayer], last: LastNodes) -> None:
    """Commit the states after each row's last kept node.

    Raises:
        IncompatibleTargetError: a state was not written by the block. Nothing is committed.
    """
    blocks = [(layer.committed, layer.trace()) for layer in layers]
    if layers[0].placement.is_chain or last.common is not None:
        make_moves(state_moves(blocks, last))
    else:  # states of rows that go on beside rows that do not are copied first: of one layer at a time
        for block in blocks:
            make_moves(state_moves([block], last))


Settle = Callable[[Sequence[StateLayer], LastNodes], None]
"""Does what `settle_states` does."""


class _HandedOut(dict[int, "Tensor | None"]):
    """States of one kind as mixers see them, by number; holds none itself."""

    def __init__(self, layer: StateLayer, kind: str):
        super().__init__()
        self._layer, self._kind = layer, kind

    def __missing__(self, number: int) -> Tensor | None:
        return self._layer.handed_out((self._kind, number))

    def __setitem__(self, number: int, state: Tensor | None) -> None:
        held = self[number]
        assert held is not None, "lazy_initialization() comes before a write"
        assert state is not None, "a state is written, not taken away"
        held.copy_(state)
