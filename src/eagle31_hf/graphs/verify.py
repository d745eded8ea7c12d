"""A target's verification as graphs of fixed shape.

A graph pays only where shapes repeat, so blocks are padded to the sizes of `cache.graph_sizes`, and what is padded is
masked. The first call at a new shape is served by the eager code, which is the reference: a graph that cannot be made,
or that disagrees, is given up and the text goes on unchanged (`graphs`). Prefill always stays eager. Single tokens have
a graph of their own, since what is padded can cost as much again (two cores of a Zen 4, bf16,
the embedded pair: a round of 2.3 ms instead of 3.5 to 5.4). Graphs make their masks themselves.

States of layers that have some are moved on after a round by a graph of their own, by what the verification left, as
far as each row keeps of it. How much is kept is a tensor, so one graph serves every count. It reads the committed
states and gives what they become, which is written over them after the replay: a step that wrote them itself would
move them on once more where it is tried before it is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..cache.graph_sizes import node_bucket
from ..cache.speculative import SpeculativeCache
from ..cache.state_tape import LastNodes, make_moves
from ..cache.states import BlockTrace, StateLayer, settle_states, state_moves
from ..drafting.draft_tree import DraftTree
from ..targets.binding import TargetBinding, TargetOutput, Verification
from .fixed_cache import CommittedStates, FixedShapeCache, GraphInputs, padded
from .graphs import Graphs
from .steps import GraphKey, buffers_of


class VerifiedBlock(NamedTuple):
    """What a graph gives: the target's output, and what the block left in layers with states."""

    logits: Tensor
    aux: Tensor | None
    traces: tuple[BlockTrace, ...]


class CompiledVerification:
    """Verification forwards of one generation, compiled where shapes allow; called as `Verification` is.

    Args:
        binding, cache: as in `Verification`; the cache of a size that `graph_sizes.cache_size` gives.
        graphs: the pair's.
        most_nodes: most nodes of a round.
    """

    def __init__(self, binding: TargetBinding, cache: SpeculativeCache, graphs: Graphs, *, most_nodes: int):
        self.binding, self.cache, self.graphs, self.most_nodes = binding, cache, graphs, most_nodes
        self.eager = Verification(binding, cache)
        self.inputs = GraphInputs(cache)
        self._traces: tuple[BlockTrace, ...] | None = None  # of the placed block, if a graph could read it
        self._committed = CommittedStates(cache.with_states)

    def __call__(self, tree: DraftTree) -> TargetOutput:
        """As `Verification`; the binding must be capturing if there is a drafter."""
        self._traces = None
        size = tree.size
        self.cache.place(size, is_draft=True)
        if not self.inputs.make_room(self._width(size)):
            return self.eager(tree)
        key = self._key_of(tree)  # rows may have become longer
        nodes = key.size
        pays = self.inputs.rows_pay and (size > 1 or nodes == 1)
        output: VerifiedBlock = self.graphs.run_or_eager(
            key,
            partial(_verify, self.binding),
            lambda: self._inputs(tree, nodes),
            lambda: self._eager_block(tree),
            pays=pays,
        )
        for layer, trace in zip(self.cache.with_states, output.traces, strict=True):
            layer.take_over(trace)
        self._traces = output.traces
        if size == nodes:
            return TargetOutput(output.logits, output.aux)
        return TargetOutput(output.logits[:, :size], None if output.aux is None else output.aux[:, :size])

    def _eager_block(self, tree: DraftTree) -> VerifiedBlock:
        output = self.eager(tree)
        return VerifiedBlock(output.logits, output.aux, tuple(layer.trace() for layer in self.cache.with_states))

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Commit accepted nodes as `SpeculativeCache.keep` does; states by a graph, if one has read the block."""
        self.cache.keep(nodes, settle=self._settle_states)

    def _settle_states(self, layers: Sequence[StateLayer], last: LastNodes) -> None:
        """As `settle_states`."""
        traces, self._traces = self._traces, None
        rows, recorded = layers[0].placement.batch_size, any(trace.recorded for trace in traces or ())
        pays = recorded or rows > 1  # else they are copies of what is there, which take one launch
        if traces is None or not pays or self.graphs.disabled_reason:
            settle_states(layers, last)
            return
        committed = self._committed
        committed.follow(layers)
        moved: tuple[Tensor, ...] = self.graphs.run_or_eager(
            GraphKey("settle", rows, layers[0].placement.num_tokens),
            _settle,
            lambda: (last.on(layers[0].placement.device), traces, committed),
            lambda: _moved(last, traces, committed),
            pays=self.inputs.rows_pay,
        )
        states = buffers_of(committed)
        if moved[0] is not states[0]:  # no graph has written them
            make_moves(list(zip(states, moved, strict=True)))

    def _key_of(self, tree: DraftTree) -> GraphKey:
        """The graph that serves so many nodes; it may be padded."""
        rows, size = tree.tokens.shape
        offsets = self.cache.position_offsets
        axes = 0 if offsets is None else len(offsets)
        shape = tree.is_chain, axes, *self.inputs.mask_widths.items()
        exact = GraphKey("verify", rows, size, shape)
        if size == 1 and (exact in self.graphs.keys or self.graphs.maker.can_make(exact)):
            return exact
        return exact._replace(size=self._width(size))

    def _width(self, size: int) -> int:
        return node_bucket(size, self.most_nodes, exact=self.graphs.maker.exact_sizes)

    def _inputs(self, tree: DraftTree, nodes: int) -> tuple:
        """What a graph reads."""
        return (
            padded(tree.tokens, nodes),
            self.inputs.slots(nodes),
            padded(tree.depths, nodes),
            None if tree.is_chain else padded(tree.ancestors, nodes, nodes),
            self.cache.position_offsets,
            self.inputs.fixed,
        )


def _verify(
    binding: TargetBinding,
    tokens: Tensor,
    slots: Tensor,
    depths: Tensor,
    ancestors: Tensor | None,
    offsets: Tensor | None,
    cache: FixedShapeCache,
) -> VerifiedBlock:
    """The step."""
    positions, masks = slots[:, :1] + depths, cache.at(slots).masks(binding.compute_dtype, ancestors, depths)
    if offsets is not None:
        positions = positions + offsets[:, :, None]  # (A, B, N)
    output = binding.forward(tokens, positions, masks, cache)
    return VerifiedBlock(output.logits, output.aux, cache.traces())


# --- states -----------------------------------------------------------------------------------------------------------


def _settle(last: Tensor, traces: Sequence[BlockTrace], committed: CommittedStates) -> tuple[Tensor, ...]:
    """The step: all states of all layers after each row's last kept node `(B,)`."""
    return _moved(LastNodes(last, last.device), traces, committed)


def _moved(last: LastNodes, traces: Sequence[BlockTrace], committed: CommittedStates) -> tuple[Tensor, ...]:
    blocks = [(layer.committed, trace) for layer, trace in zip(committed.layers, traces, strict=True)]
    moved = {id(state): new for state, new in state_moves(blocks, last)}
    return tuple([moved[id(state)] for state in buffers_of(committed)])
