"""Graphs of a target and its drafter: made by `torch.compile`, checked against the eager code, kept and let go.

A graph that cannot be made, that disagrees, or that things keep changing under is given up, and why is remembered.
"""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor import config as inductor

from .drafter import Eagle31Drafter
from .target import TargetBinding

logger = logging.getLogger(__name__)

Step = Callable[..., tuple[Tensor, ...]]

MOST_WAYS_TO_DRAW = 4
"""Sampling settings (and greedy) a kind of step is compiled for; compiling takes as long as thousands of tokens."""

PACKED_BYTES = 2**30
"""Weights of target and drafter up to which graphs for a CPU pack them: every graph holds a copy of those it reads."""

PACKING = {
    "freezing": True,  # weights become constants of the graph, laid out as its products read them
    "max_autotune": True,  # which of two products is quicker for a shape is tried; pays with packed weights alone
    "max_autotune_gemm_backends": "ATEN,CPP",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""Settings of inductor; dynamo looks at the first of them, too, so options of `torch.compile` would come too late."""


class CompiledSteps:
    """What has been compiled for a target and its drafter; outlives the generation that asked for it.

    Attributes:
        why_not: why nothing more is compiled; empty while all is well.
    """

    def __init__(self, weights: Hashable, *, packs: bool = False):
        self.weights, self.packs = weights, packs
        self.why_not = ""
        self._by_shape: dict[Hashable, Step] = {}
        self._trusted: set[Hashable] = set()  # graphs that were found to fit the models as they are now

    @classmethod
    def of(cls, drafter: Eagle31Drafter) -> CompiledSteps:
        """Those of the drafter's binding, or fresh ones after weights have changed: graphs have them built in.

        Looking at all weights takes milliseconds: to be asked once in a generation.
        """
        binding = drafter.require_binding()
        tensors = [*_weights(binding.model), *_weights(drafter)]
        packs = _packs(tensors)
        weights = tuple((*_version(tensor), _sample(tensor) if packs else None) for tensor in tensors)
        if binding.compiled is None or binding.compiled.weights != weights:
            binding.compiled = cls(weights, packs=packs)
            binding.compiled.why_not = _why_not(binding)
        binding.compiled._trusted.clear()
        return binding.compiled

    def __deepcopy__(self, memo: dict) -> None:
        """A copied binding has a target of its own, which these graphs know nothing about."""

    def __reduce__(self) -> tuple:
        return type(None), ()

    @property
    def shapes(self) -> list[Hashable]:
        """What graphs there are, by kind and shape."""
        return list(self._by_shape)

    def has(self, shape: Hashable) -> bool:
        return shape in self._by_shape

    def takes(self, kind: str, way: Hashable) -> bool:
        """Whether a graph of `kind` for this way to draw, the last item of its shape, is there or would still pay."""
        ways = {shape[-1] for shape in self._by_shape if shape[0] == kind}  # type: ignore[index]
        return way in ways or len(ways) < MOST_WAYS_TO_DRAW

    def run(self, shape: Hashable, inputs: tuple) -> tuple[Tensor, ...] | None:
        """What the graph of `shape` makes of `inputs`; `None` if there is no such graph or it cannot be used.

        Guards, which ask whether model and settings are still those compiled for, cost as much as a layer. Nothing
        they ask about changes within a generation, so they are asked once in each.
        """
        if shape not in self._by_shape:
            return None
        try:
            return self._call(shape, inputs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as failure:  # a hook that counts its calls, say
            self._stay_eager(failure)
            return None

    def _call(self, shape: Hashable, inputs: tuple) -> tuple[Tensor, ...]:
        step = self._by_shape[shape]
        if shape in self._trusted:
            try:
                with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                    return step(*inputs)
            except RuntimeError as failure:
                if "skip_guard_eval_unsafe" not in str(failure):
                    raise
                # The step was compiled more than once, and for none of those things as they are now.
        with self._compiling():
            outputs = step(*inputs)
        self._trusted.add(shape)
        return outputs

    def drop(self, why_not: str) -> None:
        """Let all graphs go; whoever holds these steps is served by eager code from now on."""
        self.why_not = why_not
        self._by_shape.clear()

    def add(self, shape: Hashable, step: Step, inputs: tuple, expected: Tensor | None) -> None:
        """Compile `step` and try it on `inputs`; its first output must begin with `expected`, up to rounding."""
        try:
            compiled = _compile(step, inputs[0].device)
            with self._compiling():
                found = compiled(*inputs)[0]
            if expected is not None:
                _require_agreement(found, expected)
        except Exception as failure:  # whatever a compiler stumbles over, the text must go on
            self._stay_eager(failure)
        else:
            self._by_shape[shape] = compiled
            self._trusted.add(shape)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Around calls that may trace a step."""
        known = {name: value for name, value in PACKING.items() if hasattr(inductor, name)}
        with inductor.patch(known if self.packs else {}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # of inductor by torch
            yield

    def _stay_eager(self, failure: Exception) -> None:
        told = [failure] if failure.__cause__ is None else [failure, failure.__cause__]  # what it met says more
        reasons = [f"{type(each).__name__}: {(str(each).splitlines() or [''])[0]}" for each in told]
        self.why_not = f"compiling failed, steps stay eager: {', '.join(reasons)}"
        logger.warning("eagle31: %s", self.why_not)


def _require_agreement(found: Tensor, expected: Tensor) -> None:
    found = found[tuple(slice(size) for size in expected.shape)]
    spread = (expected.max() - expected.min()).clamp(min=torch.finfo(expected.dtype).tiny)
    error = ((found - expected).abs().max() / spread).item()
    if not error <= LARGEST_ERRORS.get(expected.dtype, LARGEST_ROUNDING_ERROR):
        raise ArithmeticError(f"the compiled step is off by {error:.2g} of the logits' range")


LARGEST_ERRORS = {torch.float32: 1e-3, torch.float64: 1e-3}
LARGEST_ROUNDING_ERROR = 5e-2
"""Share of the logits' range two right computations may differ by: a wrong one differs by tenths."""


def _why_not(binding: TargetBinding) -> str:
    devices = set(getattr(binding.model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"the target is spread over {len(devices)} devices, steps stay eager"
    return ""


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _packs(weights: Sequence[Tensor]) -> bool:
    plain = all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in weights)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in weights}  # some are shared
    return plain and sum(sizes.values()) <= PACKED_BYTES


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> bytes:
    """A few elements, bit for bit: writes through `.data`, as adapters are merged, leave the version alone."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].contiguous().view(torch.uint8).numpy().tobytes()


SAMPLED_ELEMENTS = 64


def _compile(step: Any, device: torch.device) -> Step:
    # Graphs are kept per code object, with one limit and one list of guards for all of them: each shape gets its own.
    own = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    if device.type == "cuda":
        return _replayed(torch.compile(own, fullgraph=True, dynamic=False, mode="reduce-overhead"))
    return torch.compile(own, fullgraph=True, dynamic=False)


def _replayed(step: Step) -> Step:
    """A step whose outputs survive the next replay of its CUDA graph, which overwrites them in place."""

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(output.clone() for output in step(*inputs))

    return call
