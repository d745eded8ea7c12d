"""The recurrence kernels of mixers, answered over a chain by the model's own kernel for one token, and recorded.

A mixer calls one kernel for many tokens and another one for a single token, both as globals of its modeling file. While
this thread reads a chain, the first is answered by the second over all tokens, so that the arithmetic is that of plain
decoding, and what it was given is kept for `cache.state_tape`. At any other time, in any other thread, the call goes on
to where it would have gone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cache.shared_changes import CHANGES
from ..cache.state_tape import GatedDelta, Recorded, SelectiveScan

_running = threading.local()


@functools.lru_cache
def parameters_of(kernel: Callable[..., Any]) -> frozenset[str]:
    """Names of what it takes. Asked in every round."""
    return frozenset(inspect.signature(kernel).parameters)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """While open, kernels of this thread are answered token by token and leave here what they were given."""
    records: list[Recorded] = []
    _running.records = records
    try:
        yield records
    finally:
        _running.records = None


def _gated_delta(single: Callable[..., Any], records: list[Recorded], args: tuple, kwargs: dict[str, Any]) -> Any:
    given = dict(kwargs)
    given.pop("chunk_size", None)
    state, final = given.pop("initial_state", None), given.pop("output_final_state", True)
    decay, beta = given.pop("g", None), given.pop("beta", None)
    # Mixers hand on much that the kernel ignores.
    options = {name for name, value in given.items() if value is not None and name in parameters_of(single)}
    is_known = len(args) == 3 and not any(each is None for each in (state, decay, beta))
    if not is_known or not options <= {"use_qk_l2norm_in_kernel"}:
        return NotImplemented
    is_normed = bool(given.get("use_qk_l2norm_in_kernel"))
    records.append(Recorded(GatedDelta(is_normed=is_normed), (*args, decay, beta)))
    return single(*args, g=decay, beta=beta, initial_state=state, output_final_state=final, **given)


def _selective_scan(single: Callable[..., Any], records: list[Recorded], args: tuple, kwargs: dict[str, Any]) -> Any:
    names = ("D", "dt_bias", "initial_states")
    others = [kwargs.get(name) for name in names]
    if len(args) != 5 or any(each is None for each in others) or kwargs.get("z") is not None:
        return NotImplemented
    x, dt, a, b, c = args
    d, dt_bias, state = others
    recurrence = SelectiveScan(single, bool(kwargs.get("dt_softplus")), rounds=_rounds(single, x.dtype, x.device))
    inputs = (x, dt.clone(), b, c, a, d, dt_bias)  # dt is a slice of a much larger projection, which may go
    records.append(Recorded(recurrence, inputs))  # type: ignore[arg-type]
    outputs = recurrence.scan(inputs, state)  # type: ignore[arg-type]
    return (outputs, state) if kwargs.get("return_final_states") else outputs


@functools.lru_cache
def _rounds(kernel: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel of Mamba 2 rounds what a token adds to its state, found out with one token; for a run without
    memory on the CPU."""
    device = torch.device("cpu") if device.type == "meta" else device
    heads, width, size = 4, 64, 16
    dice = torch.Generator().manual_seed(0)
    x, dt, b = (torch.randn(shape, generator=dice).to(device, dtype) for shape in ((heads, width), (heads,), (size,)))
    state = torch.zeros(1, heads, width, size, device=device)
    args = [x[None], dt[None, :, None].expand(-1, -1, width), state.new_zeros(heads, width, size), b[None, None]]
    kernel(state, *args, b[None, None], None, z=None, dt_bias=state.new_zeros(heads, width), dt_softplus=False)
    rounded = (dt[:, None, None] * b) * x[..., None]
    exact = (dt.float()[:, None, None] * b.float()) * x.float()[..., None]
    far, near = ((state[0] - each.float()).abs().max() for each in (exact, rounded))
    return bool((near <= far).item())


class Kernels(NamedTuple):
    """Names, in modeling files, of a kernel for many tokens and of that for one, and how the one answers for the other.

    `answer` takes the kernel for one token, the records, and the arguments of the call; it returns `NotImplemented`
    where it does not know one of them.
    """

    many: str
    one: str
    answer: Callable[..., Any]


RECORDED_KERNELS = (
    Kernels("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _gated_delta),
    Kernels("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _gated_delta),
    Kernels("mamba2_chunk_scan", "mamba2_selective_state_update", _selective_scan),
)


def kernels_of(mixer: nn.Module) -> Kernels | None:
    """Those that the mixer's forward calls, if they can be recorded."""
    code = getattr(inspect.unwrap(type(mixer).forward), "__code__", None)
    names, file = set(code.co_names) if code is not None else set(), sys.modules.get(type(mixer).__module__)
    for kernels in RECORDED_KERNELS:
        if {kernels.many, kernels.one} <= names and hasattr(file, kernels.many) and hasattr(file, kernels.one):
            return kernels
    return None


def hold_kernels(mixer: nn.Module) -> AbstractContextManager[None]:
    """While open, the kernels that a mixer calls are intercepted in its modeling file, if they can be recorded."""
    kernels = kernels_of(mixer)
    if kernels is None:
        return nullcontext()
    file: Any = sys.modules[type(mixer).__module__]
    return CHANGES.held(("kernels", file.__name__, kernels.many), functools.partial(_intercept, file, kernels))


def is_held(mixer: nn.Module) -> bool:
    """Whether the mixer's calls of its kernel pass by here: others may have replaced it since."""
    kernels = kernels_of(mixer)
    return kernels is not None and hasattr(getattr(sys.modules[type(mixer).__module__], kernels.many), "is_taped")


def _intercept(file: Any, kernels: Kernels) -> Callable[[], None]:
    own = getattr(file, kernels.many)

    @functools.wraps(own)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        records = None if torch.compiler.is_compiling() else getattr(_running, "records", None)
        if records is not None:
            answered = kernels.answer(getattr(file, kernels.one), records, args, kwargs)
            if answered is not NotImplemented:
                return answered
        return own(*args, **kwargs)

    kernel.is_taped = True  # type: ignore[attr-defined]
    setattr(file, kernels.many, kernel)
    return functools.partial(setattr, file, kernels.many, own)
