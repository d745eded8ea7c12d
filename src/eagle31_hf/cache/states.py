"""Recurrent and convolution states of one layer: one of each kind per row, however long the row is.

    committed   (B, ...)      what each row's kept tokens left behind
    nodes       (N, B, ...)   what the placed block leaves: after every node, or (N = 1) after its last token

A mixer is never handed a committed state: kernels for one token write in place. It gets the node's own, filled with
what the node continues, and leaves there what follows it. `settle_states` makes the states after each row's last kept
node the committed ones, so a rejected node leaves no trace, and neither does a forward that fails half-way.

Whoever calls a mixer says so first (`begin`), and which states the mixer then asks for are its own. A state that nobody
wrote in a block, or two modules did, is an error: the text would silently be another one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ..errors import IncompatibleTargetError
from .layers import SlotLayer
from .placement import Placement
from .state_blocks import CONVOLUTION, RECURRENT, BlockTrace, MixerCall, StateKey
from .state_tape import LastNodes, Moves, Recorded, make_moves, moved_windows, rebuilt_states


class StateLayer(LinearAttentionLayer):
    """A layer of states alone; `stateful` adds them to a layer that attends, too.

    What mixers call (`update_conv_state`, `update_recurrent_state`) is transformers' own code over the states handed
    out: mixers of some versions read `conv_states` and `recurrent_states` themselves.
    """

    conv_states: MutableMapping[int, Tensor | None]  # type: ignore[assignment]
    recurrent_states: MutableMapping[int, Tensor | None]  # type: ignore[assignment]

    def __init__(self, placement: Placement, *, num_states: int, index: int):
        super().__init__(number_of_states=num_states)
        self._bind(placement, index)

    def _bind(self, placement: Placement, index: int) -> None:
        self.placement, self.index = placement, index
        self.conv_states = _HandedOut(self, CONVOLUTION)
        self.recurrent_states = _HandedOut(self, RECURRENT)
        self.make_state: Callable[[StateKey, Tensor], Tensor] = _new_state
        self._committed: dict[StateKey, Tensor] = {}
        self._nodes: dict[StateKey, Tensor] = {}
        self._writers: dict[StateKey, str] = {}
        self._written: Counter[StateKey] = Counter()
        self._call: MixerCall | None = None
        self._open: dict[StateKey, Tensor] = {}
        self._windows: dict[StateKey, Tensor] = {}  # (B, C, K + T): convolutions' windows and the chain behind them
        self._records: dict[StateKey, Recorded] = {}

    # One block ------------------------------------------------------------------------------------------------------

    def forget_block(self) -> None:
        """A new block is placed: what the last one left was committed, or is not wanted."""
        self._written.clear()
        self._call = None
        self._open, self._windows, self._records = {}, {}, {}

    def begin(self, call: MixerCall) -> None:
        """States handed out from now on are this call's."""
        self._call, self._open = call, {}
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), not call.begins)

    def end(self) -> None:
        """The call's states are what follows its node."""
        assert self._call is not None, "begin() comes before end()"
        call, opened = self._call, self._open
        for key, state in opened.items():
            rows = call.rows.rows_on(state.device)
            if rows is not None:
                self._nodes[key][call.node].index_copy_(0, rows, state)
            self._written[key] += 1
        self._call, self._open = None, {}

    def end_taped(self, recorded: Recorded) -> None:
        """The call has read a chain, of which this is left."""
        assert self._call is not None, "begin() comes before end_taped()"
        self._records[RECURRENT, 0] = recorded
        for key in (*self._records, *self._windows):
            self._written[key] = self.placement.num_state_writes
        self._call, self._open = None, {}

    def handed_out(self, key: StateKey) -> Tensor | None:
        """The state a mixer reads and writes: that of its node, filled with what the node continues."""
        if key not in self._open:
            if self._call is None:
                raise IncompatibleTargetError(
                    f"layer {self.index} of the target reads its {key[0]} from a module that was replaced after the "
                    "drafter was attached; attach the drafter again"
                )
            if key not in self._committed:
                return None
            self._open[key] = self._fill(key, self._call)
        return self._open[key]

    def _fill(self, key: StateKey, call: MixerCall) -> Tensor:
        owner = self._writers.setdefault(key, call.mixer)
        if owner != call.mixer:
            raise IncompatibleTargetError(
                f"layer {self.index} of the target: {owner} and {call.mixer} write the same state ({key[0]} {key[1]}), "
                "so that it cannot be told what a draft leaves in it; generate without a drafter"
            )
        node = self._room(key, 1 if call.taped else self.placement.num_state_nodes)[call.node]
        rows = call.rows.rows_on(node.device)
        if call.begins:
            state = node if rows is None else node[rows]
            return state.zero_()
        before = self._before(key, call)
        if rows is None:
            return node.copy_(before)
        return before.index_select(0, rows)

    def _before(self, key: StateKey, call: MixerCall) -> Tensor:
        """What a call continues, `(B, ...)`."""
        if call.parents is None:
            return self._live(key)
        nodes = self._nodes[key]
        if isinstance(call.parents, int):
            return nodes[call.parents][: self.placement.batch_size]
        parents, rows = call.parents.on(nodes.device)
        return nodes[parents, rows]

    def _live(self, key: StateKey) -> Tensor:
        state, rows = self._committed[key], self.placement.batch_size
        return state if len(state) == rows else state[:rows]

    def _room(self, key: StateKey, num_nodes: int) -> Tensor:
        """Where the block's states go, `(N, B, ...)`."""
        rows = self.placement.batch_size
        nodes = self._nodes.get(key)
        if nodes is None or nodes.shape[0] < num_nodes or nodes.shape[1] < rows:
            self._nodes.pop(key, None)
            nodes = None  # nothing in it is needed: the old one goes before the new one comes
            committed = self._committed[key]
            self._nodes[key] = nodes = committed.new_empty(num_nodes, *committed.shape)
        return nodes[:, :rows]

    def stepped_moves(self, last: LastNodes) -> Moves:
        """States that the block left one after the other, each with that after a row's last kept node."""
        if last.common is not None:
            return [
                (self._live(key), self._nodes[key][last.common][: self.placement.batch_size]) for key in self._stepped
            ]
        return [(self._live(key), self._picked(key, last)) for key in self._stepped]

    def _picked(self, key: StateKey, last: LastNodes) -> Tensor:
        """Each row's own, `(B, ...)`."""
        live, nodes = self._live(key), self._nodes[key]
        kept = last.on(live.device)
        picked = nodes[kept.clamp(min=0), torch.arange(len(live), device=live.device)]
        return torch.where((kept >= 0).view(-1, *[1] * (live.dim() - 1)), picked, live)

    def require_all_written(self) -> None:
        """Raise an `IncompatibleTargetError` if a state was not written by the block, or not after every node."""
        wanted = self.placement.num_state_writes
        for key in self._committed:
            if self._written[key] != wanted:
                raise IncompatibleTargetError(
                    f"layer {self.index} of the target wrote its state ({key[0]} {key[1]}) {self._written[key]} times "
                    f"in a block that wants {wanted}: a module was replaced after the drafter was attached; attach it "
                    "again, or generate without a drafter"
                )

    @property
    def _stepped(self) -> list[StateKey]:
        """States that the block left one after the other, in one order always."""
        return [key for key in self._committed if key not in self._windows and key not in self._records]

    def trace(self) -> BlockTrace:
        """What the placed block has left.

        Raises:
            IncompatibleTargetError: as of `require_all_written`.
        """
        self.require_all_written()
        recorded = self._records.get((RECURRENT, 0))
        nodes, rows = self.placement.num_state_nodes, self.placement.batch_size
        return BlockTrace(
            tuple((key, self._nodes[key][:nodes, :rows]) for key in self._stepped),
            tuple(self._windows.items()),
            None if recorded is None else (recorded.recurrence, recorded.inputs),
        )

    def take_over(self, trace: BlockTrace) -> None:
        """The placed block has left this: another layer, which began with the same states, has read it."""
        self._nodes.update(trace.nodes)
        self._windows = dict(trace.windows)
        self._records = {} if trace.recorded is None else {(RECURRENT, 0): Recorded(*trace.recorded)}
        self._written = Counter(dict.fromkeys(self._committed, self.placement.num_state_writes))

    @property
    def committed(self) -> dict[StateKey, Tensor]:
        """What is committed of all rows, where it lies."""
        return {key: self._live(key) for key in self._committed}

    @property
    def taped_windows(self) -> list[tuple[Tensor, Tensor]]:
        """Committed windows, each with what it was part of."""
        return [(self._live(key), columns) for key, columns in self._windows.items()]

    @property
    def taped_states(self) -> list[tuple[Tensor, Recorded]]:
        """Committed states, each with what goes on from it."""
        return [(self._live(key), recorded) for key, recorded in self._records.items()]

    # Called by transformers' own code --------------------------------------------------------------------------------

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """The window before, and what is new, `(B, C, K + T)`."""
        if self._call is None or not self._call.taped:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        key = (CONVOLUTION, state_idx)
        self._windows[key] = columns = torch.cat((self._live(key), conv_states), dim=-1)
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """The state as it was written; a chain's end is not kept."""
        if self._call is not None and self._call.taped:
            return recurrent_states
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Own what a mixer is about to write for the first time."""
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self._own((CONVOLUTION, state_idx), conv_states.new_empty((*conv_states.shape[:-1], size)))
        if recurrent_states is not None:
            self._own((RECURRENT, state_idx), recurrent_states)

    def _own(self, key: StateKey, like: Tensor) -> None:
        """Hold such a state of every row, empty so far. `like`: `(*, ...)`."""
        kind, number = key
        rows = self.placement.reserved_rows or self.placement.batch_size
        self._committed[key] = self.make_state(key, like[:1].expand(rows, *like.shape[1:]))
        if kind == CONVOLUTION:
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = like.shape[-1]
        else:
            self.is_recurrent_states_initialized[number] = True

    # The rest of what a cache does with it ---------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of what is committed, of what blocks leave, and of what is recorded of the last one."""
        held = [*self._committed.values(), *self._nodes.values(), *self._windows.values()]
        for recorded in self._records.values():
            held += [tensor for tensor in recorded.inputs if not isinstance(tensor, nn.Parameter)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return sum(storages.values())  # inputs are views of what the convolution made: that is what stays

    def release_nodes(self) -> None:
        """Give back what the next block makes again."""
        self._nodes = {}
        self.forget_block()

    def select_states(self, rows: Sequence[int]) -> None:
        self._committed = {
            key: state.index_select(0, torch.tensor(rows, device=state.device))
            for key, state in self._committed.items()
        }
        self.release_nodes()

    def held_states(self, row: int | None = None) -> dict[StateKey, Tensor]:
        """What is committed of one row, `(1, ...)`, or of all, as copies."""
        rows = slice(0, self.placement.batch_size) if row is None else slice(row, row + 1)
        return {key: state[rows].clone() for key, state in self._committed.items()}

    def load_states(self, states: Mapping[StateKey, Tensor]) -> None:
        """Take over states of all rows."""
        for key, state in states.items():
            if key not in self._committed:
                self._own(key, state)
            self._live(key).copy_(state)

    def copy_states(self, row: int, source: StateLayer, source_row: int) -> None:
        """Let a row begin where a row of another cache's layer is. A row may lie behind the live ones."""
        for key, state in source._committed.items():
            if key not in self._committed:
                self._own(key, state)
            self._committed[key][row].copy_(state[source_row])

    def wipe_states(self, row: int) -> None:
        """Leave nothing of what was ever written to a row."""
        for state in self._committed.values():
            state[row].zero_()
        self.release_nodes()

    def exchange_states(self, one: int, other: int) -> None:
        """Let two rows change places."""
        for state in self._committed.values():
            state[[one, other]] = state[[other, one]]


def _new_state(key: StateKey, like: Tensor) -> Tensor:
    """Zeros like it."""
    return like.new_zeros(like.shape)


def state_moves(layers: Sequence[StateLayer], last: LastNodes) -> Moves:
    """Committed states of all layers, each with that after the rows' last kept nodes. Nothing is written."""
    stepped = [move for layer in layers for move in layer.stepped_moves(last)]
    return stepped + _taped_moves(layers, last)


def _taped_moves(layers: Sequence[StateLayer], last: LastNodes) -> Moves:
    moved = moved_windows([pair for layer in layers for pair in layer.taped_windows], last)
    return moved + rebuilt_states([pair for layer in layers for pair in layer.taped_states], last)


def settle_states(layers: Sequence[StateLayer], last: LastNodes) -> None:
    """Commit the states after each row's last kept node.

    Raises:
        IncompatibleTargetError: a state was not written by the block, or not after every node. Nothing is committed.
    """
    for layer in layers:
        layer.require_all_written()
    if last.common is not None:
        make_moves([move for layer in layers for move in layer.stepped_moves(last)])
    else:  # each row's own are copies: of one layer at a time
        for layer in layers:
            make_moves(layer.stepped_moves(last))
    make_moves(_taped_moves(layers, last))


Settle = Callable[[Sequence[StateLayer], LastNodes], None]
"""Does what `settle_states` does."""


class _HandedOut(MutableMapping[int, "Tensor | None"]):
    """States of one kind as mixers see them, by number."""

    def __init__(self, layer: StateLayer, kind: str):
        self._layer, self._kind = layer, kind

    def __getitem__(self, number: int) -> Tensor | None:
        if not 0 <= number < len(self):
            raise KeyError(number)
        return self._layer.handed_out((self._kind, number))

    def __setitem__(self, number: int, state: Tensor | None) -> None:
        held = self[number]
        assert held is not None, "lazy_initialization() comes before a write"
        assert state is not None, "a state is written, not taken away"
        held.copy_(state)

    def __delitem__(self, number: int) -> None:
        raise TypeError("states stay where they are")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._layer.number_of_states


@functools.cache
def stateful(attention: type[SlotLayer]) -> Any:
    """A kind of layer that attends as `attention` does and keeps states beside keys and values."""

    class StatefulLayer(StateLayer, attention):  # type: ignore[misc, valid-type]
        is_compileable = False
        is_croppable = False

        def __init__(self, placement: Placement, *layout: Any, num_states: int, index: int, **how: Any):
            LinearAttentionLayer.__init__(self, number_of_states=num_states)
            attention.__init__(self, placement, *layout, **how)
            self._bind(placement, index)

        def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:  # type: ignore[override]
            """For keys and values, given by position, or for a state, given by name."""
            if keys_and_values:
                attention.lazy_initialization(self, *keys_and_values)
            else:
                StateLayer.lazy_initialization(self, **states)

    StatefulLayer.__name__ = f"Stateful{attention.__name__}"
    return StatefulLayer
