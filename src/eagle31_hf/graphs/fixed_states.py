"""Layers with states as captured steps see them: what is committed, where it lies, and a block that leaves its trace.

A step reads the committed states of a `SpeculativeCache` and writes none of them: a layer hands out states of its own,
made in the step, and what the block leaves is among the step's outputs (`BlockTrace`). How much of it is kept is known
after the step, and then another one moves the states on (`settle`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ..cache.placement import Placement
from ..cache.state_tape import Recorded
from ..cache.states import CONVOLUTION, BlockTrace, StateLayer


class FixedStates(StateLayer):
    """The committed states of one `StateLayer`.

    Args:
        placement: of the blocks that steps read.
        source: whose states they are.
    """

    def __init__(self, placement: Placement, source: StateLayer):
        LinearAttentionLayer.__init__(self, number_of_states=source.number_of_states)
        self._bind(placement, source.index)

    def take_states(self, source: StateLayer) -> None:
        """Stand for the states that this layer has committed of its rows."""
        self._committed = source.committed
        for (kind, number), state in self._committed.items():
            if kind == CONVOLUTION:
                self.is_conv_states_initialized[number] = True
                self.conv_kernel_size[number] = state.shape[-1]
            else:
                self.is_recurrent_states_initialized[number] = True

    def trace(self) -> BlockTrace:
        """As of any layer; outputs of a step must not be weights themselves."""
        trace = super().trace()
        if trace.recorded is None:
            return trace
        inputs = [each.clone() if isinstance(each, nn.Parameter) else each for each in trace.recorded.inputs]
        return trace._replace(recorded=Recorded(trace.recorded.recurrence, tuple(inputs)))

    @property
    def lent(self) -> list[Tensor]:
        """What steps read, always in one order."""
        return [self._committed[key] for key in sorted(self._committed)]

    def lend(self, states: list[Tensor]) -> None:
        """Read these in the places of `lent`, and forget what the last block left."""
        self._committed = dict(zip(sorted(self._committed), states, strict=True))
        self.release_block()


class CommittedStates:
    """The committed states of a cache, lent to a step that moves them on: what it gives is written over them.

    Args:
        sources: the cache's layers with states.
    """

    takes_outputs = True

    def __init__(self, sources: Sequence[StateLayer]):
        self.placement = Placement(1, 1, torch.device("cpu"))  # of which layers ask how many rows there are
        self.layers = [FixedStates(self.placement, source) for source in sources]

    @property
    def lent(self) -> list[Tensor]:
        """All of them, layer by layer."""
        return [state for layer in self.layers for state in layer.lent]

    def follow(self, sources: Sequence[StateLayer]) -> None:
        """Take the states that these layers have now."""
        if (rows := sources[0].placement.batch_size) != self.placement.batch_size:
            self.placement.set_batch(rows)
        for layer, source in zip(self.layers, sources, strict=True):
            layer.take_states(source)
