"""Graphs of a target and its drafter: made by a `GraphMaker`, checked against the eager code, kept and let go.

A graph that cannot be made, that disagrees, or that things keep changing under is given up, and why is remembered.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.kept_buffers import KeptBuffers
from ..drafter.assistant import Assistant
from ..errors import named_line
from .seen import ModelState, SeenWeights
from .steps import GraphKey, GraphMaker, OtherInputsError, RecordingFailedError, Step, tensors_in

logger = logging.getLogger(__name__)

MOST_GRAPHS = 1024
"""Of one state of a target. One more, and all go: clients may ask for ever other sampling settings."""

MOST_STATES = 2
"""States of a target whose graphs are kept: with an adapter and without it."""

MOST_DISAGREEMENTS = 2
"""Of graphs of one key with eager code. A right one may disagree where half precision is coarse: behind special tokens
that are drafted in vain, say."""

PACKED_BYTES = 2**30
"""Weights of target and drafter up to which graphs for a CPU read packed ones: a copy that all graphs share."""


class Graphs:
    """The graphs of a target and its drafter; they outlive the generation that asked for them.

    Args:
        drafter: attached.
        weights: of both, as `weights_of` gives them.
        state: of the target that graphs are made for.

    Attributes:
        may_pack: whether graphs for a CPU may read packed copies of the weights.
        packed: copies of the weights that kept graphs share (`ahead.packed_weights`).
        maker: makes those that are not there yet; see `made_by`.
        kept: keys and values over which steps were captured, for the next text.
    """

    def __init__(self, drafter: Assistant, weights: list[Tensor], state: ModelState):
        num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values())  # some are shared
        are_plain = all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in weights)
        self.may_pack = are_plain and 0 < num_bytes <= PACKED_BYTES
        self.weights = SeenWeights(weights, by_content=self.may_pack)
        self.state, self._steps = state, dict[GraphKey, Step]()
        self._of_states = [(self.state, self._steps)]  # the last one used comes last
        self.maker, self.kept, self._disagreed = GraphMaker(), KeptBuffers(), Counter[GraphKey]()
        self.packed: Any = None
        self._reasons: list[str] = []
        devices = set(getattr(drafter.binding.model, "hf_device_map", {}).values())
        if len(devices) > 1:
            self.disabled_reason = f"the target is spread over {len(devices)} devices, steps stay eager"

    @property
    def disabled_reason(self) -> str:
        """Why nothing more is compiled; empty while all is well."""
        return self._reasons[-1] if self._reasons else ""

    @disabled_reason.setter
    def disabled_reason(self, reason: str) -> None:
        self._reasons[:] = [reason]

    def made_by(self, maker: GraphMaker) -> Graphs:
        """These graphs, of which those that are missing are made by `maker`: what one generation uses."""
        view = copy.copy(self)  # one set of graphs and reasons
        view.maker = maker
        return view

    def use(self, state: ModelState) -> None:
        """Go on with the graphs of this state of the target; `MOST_STATES` of them have some. Texts that are being
        written keep those they began with."""
        if self.state == state:
            return
        known = next((each for each in self._of_states if each[0] == state), (state, {}))
        others = [each for each in self._of_states if each is not known]
        self._of_states[:] = [*others, known][-MOST_STATES:]
        self.state, self._steps = known

    @property
    def keys(self) -> list[GraphKey]:
        """What graphs there are."""
        return list(self._steps)

    def run_or_eager(
        self, key: GraphKey, step: Step, inputs: Callable[[], tuple], eager: Callable[[], Any], *, pays: bool
    ) -> Any:
        """What the graph of `key` makes of its inputs, or what eager code does where there is no such graph.

        The first call at a key makes the graph (`GraphMaker`), whose numbers are checked against the eager outputs';
        these are then returned.

        Args:
            key: which graph.
            step: what it computes.
            inputs: what the step takes; keys and values in memory that stays where it is.
            eager: the same outputs without a graph; `None` where eager code has no such step in one piece: a new graph
                is then checked against the step as it stands.
            pays: whether a new graph would.
        """
        graph = self._steps.get(key)
        if self.disabled_reason or not (graph or (pays and self.maker.can_make(key))):
            return eager()
        filled = inputs()
        if graph is None:
            return self._make(key, step, filled, eager())
        try:
            return graph(*filled)
        except RecordingFailedError as failure:  # for the caches of another text
            self.give_up(failure, self.maker.failure)
        except OtherInputsError:
            pass
        return eager()

    def _make(self, key: GraphKey, step: Step, filled: tuple, outputs: Any) -> Any:
        """The eager `outputs`, with which the new graph agrees or is given up."""
        if len(self._steps) >= MOST_GRAPHS:
            self._steps.clear()
        try:
            outputs = step(*filled) if outputs is None else outputs
            made = self.maker.make(key, step, filled, outputs)
            _require_agreement(_numbers_in(made(*filled)), _numbers_in(outputs))
            self._steps[key] = made
        except ArithmeticError as failure:
            self._disagreed[key] += 1
            if self._disagreed[key] == MOST_DISAGREEMENTS:
                self.give_up(failure, "a graph computes something else than the model")
        except Exception as failure:  # whatever a compiler stumbles over, the text must go on
            self.give_up(failure, self.maker.failure)
        return outputs

    def drop(self, reason: str) -> None:
        """Let all graphs go, the memory they write in and their copies of weights; texts that hold these graphs are
        written by eager code from now on."""
        self.disabled_reason = reason
        for _, steps in self._of_states:
            steps.clear()
        self.kept.clear()
        if self.packed is not None:
            self.packed.clear()

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Let some go, to be made again where they are wanted."""
        for key in list(keys):
            self._steps.pop(key, None)

    def give_up(self, failure: Exception, what: str) -> None:
        """Make no more graphs, and say why: `what` did not work, by a `failure`."""
        told = [failure] if failure.__cause__ is None else [failure, failure.__cause__]  # what it met says more
        self.disabled_reason = f"{what}, steps stay eager: {', '.join(map(named_line, told))}"
        logger.warning("eagle31: %s", self.disabled_reason)


def _numbers_in(outputs: Any) -> list[Tensor]:
    """Scores, hidden states and what recurrent states are moved on by; tokens may differ where scores tie."""
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


def _require_agreement(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raise an `ArithmeticError` unless each tensor is what is expected, in its leading corner, up to rounding."""
    if len(found) != len(expected):
        raise ArithmeticError(f"the compiled step gives {len(found)} tensors to compare; wanted {len(expected)}")
    errors = [_error_of(*pair, by_range=place == 0) for place, pair in enumerate(zip(found, expected, strict=True))]
    for place, error in enumerate(torch.stack(errors).tolist()):  # one wait for all
        if not error <= LARGEST_ERRORS.get(expected[place].dtype, LARGEST_ROUNDING_ERROR):
            where = f"output {place + 1} of {len(expected)} that were compared"
            raise ArithmeticError(f"the compiled step is off by {error:.2g} of the range of {where}")


def _error_of(found: Tensor, expected: Tensor, *, by_range: bool) -> Tensor:
    """`()` the largest difference, as a share of what is expected: of its range, which logits go by, or its largest."""
    found = found[tuple(slice(size) for size in expected.shape)]
    are_none = found.isnan() & expected.isnan()  # of a text that is to fail, beside others that are not
    found, expected = (each.masked_fill(are_none, 0.0).double() for each in (found, expected))
    scale = expected.max() - expected.min() if by_range else expected.abs().max()
    return (found - expected).abs().max() / scale.clamp(min=torch.finfo(torch.float32).tiny)


LARGEST_ERRORS = {torch.float32: 1e-3, torch.float64: 1e-3}
LARGEST_ROUNDING_ERROR = 5e-2
"""Share of a range by which two right computations may differ: a wrong one differs by tenths."""
