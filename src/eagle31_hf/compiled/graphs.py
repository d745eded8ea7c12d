"""Graphs of a target and its drafter: made by a `GraphMaker`, checked against the eager code, kept and let go.

A graph that cannot be made, that disagrees, or that things keep changing under is given up, and why is remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.kept_buffers import KeptBuffers
from ..drafter.assistant import Assistant
from ..target.binding import TargetBinding
from .ahead.packages import freezing
from .ahead.packed_weights import PackedWeights
from .ahead.repeated_layers import LayerCutter
from .graph_makers import GraphKey, GraphMaker, MakesNone, OtherInputsError, RecordingFailedError, Step
from .seen_state import ModelState
from .seen_weights import SeenWeights, weights_of

logger = logging.getLogger(__name__)

MOST_SAMPLING_SETTINGS = 4
"""Sampling settings (and greedy) a kind of step is compiled for; compiling takes as long as thousands of tokens."""

PACKED_BYTES = 2**30
"""Weights of target and drafter up to which graphs for a CPU read packed ones: a copy that all graphs share."""

FROZEN_BYTES = 2**26
"""Weights up to which each graph is compiled whole around a packed copy of its own: of small products, calling one
takes a good part, and compiled into the graph they are not called."""


class Graphs:
    """The graphs of a target and its drafter; they outlive the generation that asked for them.

    Attributes:
        settings: of inductor, if every graph has a packed copy of its weights built in; else empty.
        cutter: cuts steps into layers that are compiled one for all; `None`: they are compiled whole.
        maker: makes those that are not there yet; see `made_by`.
        kept: keys and values over which steps were captured, for the next text.
        digest: of all weights, once somebody has computed it.
        warmed: what texts had compiled ahead for them.
        state: of the target that they were made for.
    """

    def __init__(
        self,
        weights: SeenWeights,
        state: ModelState,
        *,
        settings: Mapping[str, Any] | None = None,
        cutter: LayerCutter | None = None,
    ):
        self.weights, self.state, self.settings, self.cutter = weights, state, settings or {}, cutter
        self.maker: GraphMaker = MakesNone()
        self.kept = KeptBuffers()
        self.digest = ""
        self.warmed: set[Hashable] = set()
        self._reasons: list[str] = []
        self._steps: dict[GraphKey, Step] = {}

    @property
    def freezes_weights(self) -> bool:
        """Whether every graph has a packed copy of its weights built in."""
        return bool(self.settings)

    @property
    def reads_packed_weights(self) -> bool:
        """Whether products read weights as the processor likes them laid out, built in or shared."""
        return self.freezes_weights or self.cutter is not None

    @property
    def disabled_reason(self) -> str:
        """Why nothing more is compiled; empty while all is well."""
        return self._reasons[-1] if self._reasons else ""

    @disabled_reason.setter
    def disabled_reason(self, reason: str) -> None:
        self._reasons[:] = [reason]

    def made_by(self, maker: GraphMaker) -> Graphs:
        """These graphs, of which those that are missing are made by `maker`: what one generation uses."""
        view = object.__new__(Graphs)
        view.__dict__.update(self.__dict__)  # one set of graphs and reasons
        view.maker = maker
        return view

    @classmethod
    def current(cls, drafter: Assistant, before: Graphs | None, state: ModelState | None = None) -> Graphs:
        """Those of a pair as it is now, since graphs have weights and the target's state built in.

        Args:
            before: the pair's until now. After weights have changed others take their place; after something else has,
                they let all graphs go.
            state: the target's, if it was just looked at.
        """
        binding = drafter.binding
        weights, state = weights_of(binding.model, drafter), state or ModelState(binding.model)
        if before is None or not before.weights.are_still(weights):
            return cls._none_yet(drafter, weights, state)
        if before.state != state:
            before.state = state
            before.forget(before.keys)
            before.warmed.clear()
        return before

    @classmethod
    def _none_yet(cls, drafter: Assistant, weights: list[Tensor], state: ModelState) -> Graphs:
        binding, num_bytes = drafter.binding, _num_bytes(weights)
        copies = _are_plain(weights) and num_bytes <= PACKED_BYTES
        freezes = copies and num_bytes <= FROZEN_BYTES
        graphs = cls(
            SeenWeights(weights, whole=weights_of(binding.model), by_content=copies),
            state,
            settings=freezing(binding.compute_dtype) if freezes else None,
            cutter=_cutter(binding, weights) if copies and not freezes else None,
        )
        graphs.disabled_reason = _disabled_reason(binding)
        return graphs

    @property
    def keys(self) -> list[GraphKey]:
        """What graphs there are."""
        return list(self._steps)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._steps

    def run_or_eager(
        self,
        key: GraphKey,
        make: Callable[[], Step] | None,
        inputs: Callable[[], tuple],
        eager: Callable[[], Any],
        *,
        reference: Callable[[], Tensor | None] | None = None,
        compared: Callable[[Any], Sequence[Tensor]] = itemgetter(slice(1)),
    ) -> Any:
        """What the graph of `key` makes of its inputs, or what eager code does where there is no such graph.

        The first call at a key makes the graph (`GraphMaker`), which is checked against the eager outputs; these are
        then returned.

        Args:
            key: which graph.
            make: the step to compile; `None` where a new graph would not pay.
            inputs: what the step takes, in memory that stays where it is.
            eager: the same outputs without a graph; anything where `reference` is given.
            reference: what the first output must begin with, where that is cheaper than all of `eager`: the new graph
                then serves the first call, too. It may give `None`: nothing to check by.
            compared: what of the outputs must agree with the eager ones; default: the first.
        """
        known = key in self._steps
        if self.disabled_reason or not (known or (make is not None and self.can_compile(key))):
            return eager()
        filled = inputs()
        if not known:
            assert make is not None, "asked above"
            if reference is None:
                outputs = eager()
                self._add(key, make(), filled, compared(outputs), compared)
                return outputs
            expected = reference()
            self._add(key, make(), filled, [] if expected is None else [expected], compared)
        outputs = self._run(key, filled)
        return eager() if outputs is None else outputs

    def can_compile(self, key: GraphKey) -> bool:
        """Whether one more graph for this way to choose tokens is there or would still pay."""
        if not self.maker.can_make(key):
            return False
        settings = {known.sampling for known in self._steps if known.kind == key.kind}
        return key.sampling is None or key.sampling in settings or len(settings) < MOST_SAMPLING_SETTINGS

    def _run(self, key: GraphKey, inputs: tuple) -> Any:
        """What the graph of `key` makes of `inputs`; `None` if there is no such graph or it cannot be used."""
        if key not in self._steps:
            return None
        try:
            return self._steps[key](*inputs)
        except RecordingFailedError as failure:  # for the caches of another text
            self.give_up(failure, self.maker.failure)
            return None
        except OtherInputsError:
            return None

    def drop(self, reason: str) -> None:
        """Let all graphs go, and the memory they write in; whoever holds these is served by eager code from now on."""
        self.disabled_reason = reason
        self._steps.clear()
        self.kept.clear()

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Let some go, to be made again where they are wanted."""
        for key in list(keys):
            self._steps.pop(key, None)

    def _add(
        self,
        key: GraphKey,
        step: Step,
        inputs: tuple,
        expected: Sequence[Tensor],
        compared: Callable[[Any], Sequence[Tensor]],
    ) -> None:
        """Make a graph of `step` and try it on `inputs`; if anything is `expected`, what is `compared` of its outputs
        must agree with that, up to rounding."""
        maker = self.maker
        try:
            compiled = maker.make(key, step, inputs)
            found = compared(compiled(*inputs))
            if expected:
                _require_agreement(found, expected)
        except Exception as failure:  # whatever a compiler stumbles over, the text must go on
            self.give_up(failure, maker.failure)
        else:
            self._steps[key] = compiled

    def give_up(self, failure: Exception, what: str) -> None:
        """Make no more graphs, and say why: `what` did not work, by a `failure`."""
        told = [failure] if failure.__cause__ is None else [failure, failure.__cause__]  # what it met says more
        reasons = [f"{type(each).__name__}: {(str(each).splitlines() or [''])[0]}" for each in told]
        self.disabled_reason = f"{what}, steps stay eager: {', '.join(reasons)}"
        logger.warning("eagle31: %s", self.disabled_reason)


def _require_agreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
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


def _disabled_reason(binding: TargetBinding) -> str:
    devices = set(getattr(binding.model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"the target is spread over {len(devices)} devices, steps stay eager"
    return ""


def _cutter(binding: TargetBinding, weights: Sequence[Tensor]) -> LayerCutter:
    return LayerCutter({type(layer) for layer in binding.layers}, PackedWeights(weights))


def _are_plain(weights: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in weights)


def _num_bytes(weights: Sequence[Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values())  # some are shared
