"""How graphs come about: what tells them apart, who makes those that are missing, and what `torch.compile` is told."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch._inductor import config as inductor

from .repeated_layers import LayerCompiler, compile_whole

Step = Callable[..., Any]
"""Tensors in, a NamedTuple of tensors out."""


class OtherInputsError(Exception):
    """A graph was called with inputs that it was not made for; eager code serves them."""


class RecordingFailedError(Exception):
    """A step could not be recorded, for the first time or again; eager code serves what it was to compute."""


class GraphKey(NamedTuple):
    """What tells graphs of one pair of models apart.

    Attributes:
        kind: of step.
        rows: batch size.
        size: tokens or nodes it is about.
        shape: whatever else its inputs' shapes depend on.
        sampling: how tokens are chosen in it; `None` where none are.
    """

    kind: str
    rows: int
    size: int
    shape: tuple = ()
    sampling: Hashable = None


class GraphMaker(Protocol):
    """Where graphs come from that are not there yet.

    Attributes:
        traces: its graphs have guards, and are made and run under inductor's settings. It makes none for single tokens:
            what drafts in vain cost is less than to compile for a minute.
        exact_sizes: making one takes so little that blocks are not padded to sizes that many rounds share.
        weights_seen: for this generation, the pair's weights were compared with those of its graphs already.
        failure: what is said where it could not make one.
    """

    @property
    def traces(self) -> bool: ...

    @property
    def exact_sizes(self) -> bool: ...

    @property
    def weights_seen(self) -> bool: ...

    @property
    def failure(self) -> str: ...

    def can_make(self, key: GraphKey) -> bool:
        """Whether it has, or would make, the graph of `key`; the same throughout a generation."""

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        """The graph of `step`. May raise anything."""


class CompilesAtOnce:
    """A `GraphMaker` that lets `torch.compile` make each graph where it is first wanted."""

    traces, failure = True, "compiling failed"
    exact_sizes = weights_seen = False

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        return compile_step(step)


def freezing(dtype: torch.dtype) -> dict[str, Any]:
    """Settings of inductor for graphs that hold their weights; dynamo looks at the first of them, too, so options of
    `torch.compile` would come too late.

    Products are oneDNN's or inductor's own. In float32 its own are never slower (two AVX2 cores, the embedded pair's
    graphs: 0.94 to 1.00 of the time of what trying chose), and trying takes a third of a graph's time to compile; in
    other precisions it depends on the shape and on the processor.
    """
    return {
        "freezing": True,  # weights become constants of the graph, laid out as its products read them
        "max_autotune": True,  # looks at inductor's own products; pays with frozen weights alone
        "max_autotune_gemm_backends": "CPP" if dtype == torch.float32 else TRIED_PRODUCTS,
        "autotune_num_choices_displayed": 0,
        "max_autotune_report_choices_stats": False,
    }


TRIED_PRODUCTS = "ATEN,CPP"
"""Which of them is quicker is tried for each shape, on a machine that does nothing else."""


@contextmanager
def compiling(settings: Mapping[str, Any], compiler: LayerCompiler | None) -> Iterator[None]:
    """Around calls that may trace a step.

    Args:
        settings: of inductor; those that this version does not know are left out.
        compiler: as `Graphs.compiler`.
    """
    known = {name: value for name, value in settings.items() if hasattr(inductor, name)}
    before = _compiler.set(compiler)
    try:
        with inductor.patch(known), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # of inductor by torch
            yield
    finally:
        _compiler.reset(before)


def compile_step(step: Any) -> Step:
    # Graphs are kept per code object, with one limit and one list of guards for all of them: each shape gets its own.
    own = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=_inductor)


_compiler: ContextVar[LayerCompiler | None] = ContextVar("compiler", default=None)
"""Whose graphs are being traced, as settings of inductor say how."""


def _inductor(captured: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Backend of `torch.compile`."""
    compiler = _compiler.get()
    return compile_whole(captured, inputs) if compiler is None else compiler(captured, inputs)
