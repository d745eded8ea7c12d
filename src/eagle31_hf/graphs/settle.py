"""Moving states on after a round, as a graph: by what a captured verification left, as far as each row keeps of it.

How much is kept is a tensor, so one graph serves every count. It reads the committed states and gives what they become,
which is written over them after the replay: a step that wrote them itself would move them on once more where it is
tried before it is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..cache.speculative import SpeculativeCache
from ..cache.state_tape import LastNodes, LastNodesInGraph, make_moves
from ..cache.states import BlockTrace, StateLayer, settle_states, state_moves
from .fixed_states import CommittedStates
from .graph_makers import GraphKey
from .graphs import Graphs
from .inputs import GraphInputs


class CompiledSettling:
    """How a cache's states are moved on by graphs, for `SpeculativeCache.keep`.

    Args:
        graphs: the pair's.
        inputs: of the target's steps.

    Attributes:
        traces: what the placed block has left, if a graph has read it.
    """

    def __init__(self, cache: SpeculativeCache, graphs: Graphs, inputs: GraphInputs):
        self.graphs, self.inputs = graphs, inputs
        self.traces: tuple[BlockTrace, ...] | None = None
        self._committed = CommittedStates(cache.with_states)

    def __call__(self, layers: Sequence[StateLayer], last: LastNodes) -> None:
        """As `settle_states`."""
        traces, self.traces = self.traces, None
        rows, recorded = len(last.nodes), any(trace.recorded for trace in traces or ())
        pays = recorded or rows > 1  # else they are copies of what is there, which take one launch
        if traces is None or not pays or self.graphs.disabled_reason:
            settle_states(layers, last)
            return
        committed = self._committed
        committed.follow(layers)
        moved: tuple[Tensor, ...] = self.graphs.run_or_eager(
            GraphKey("settle", rows, layers[0].placement.num_tokens),
            (lambda: _settle) if self.inputs.rows_pay else None,
            lambda: (last.on(layers[0].placement.device), self._filled(traces), committed),
            lambda: _moved(last, traces, committed),
            compared=lambda moved: moved,
        )
        if moved[0] is not committed.lent[0]:
            make_moves(list(zip(committed.lent, moved, strict=True)))

    def _filled(self, traces: Sequence[BlockTrace]) -> tuple[BlockTrace, ...]:
        """Tensors as graphs read them, dense."""

        def filled(layer: int, trace: BlockTrace) -> BlockTrace:
            return trace.through(lambda name, tensor: self.inputs.fill(f"{name} of layer {layer}", tensor))

        return tuple([filled(layer, trace) for layer, trace in enumerate(traces)])


def _settle(last: Tensor, traces: Sequence[BlockTrace], committed: CommittedStates) -> tuple[Tensor, ...]:
    """The step: all states of all layers after each row's last kept node `(B,)`."""
    return _moved(LastNodesInGraph(last), traces, committed)


def _moved(last: LastNodes, traces: Sequence[BlockTrace], committed: CommittedStates) -> tuple[Tensor, ...]:
    for layer, trace in zip(committed.layers, traces, strict=True):
        layer.take_over(trace)
    moved = {id(state): new for state, new in state_moves(committed.layers, last)}
    for layer in committed.layers:
        layer.release_block()
    return tuple([moved[id(state)] for state in committed.lent])
