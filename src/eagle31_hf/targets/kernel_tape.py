"""The recurrence kernels of mixers, answered over a chain by the model's own kernel for one token, and recorded.

A mixer calls one kernel for many tokens and another one for a single token, both as globals of its modeling file. While
this thread reads a chain, the first is answered by the second over all tokens, so that the arithmetic is that of plain
decoding, and what it was given is kept for `cache.state_tape`. At any other time, in any other thread, the call goes on
to where it would have gone.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..cache.state_tape import GatedDelta, Kernels, Recorded, SelectiveScan, kernels_of, parameters_of
from .shared_changes import CHANGES

_running = threading.local()
_SETTINGS = (bool, int, float, str, type(None))


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
    is_known = len(args) == 3 and not any(each is None for each in (state, decay, beta))
    options = {name: value for name, value in given.items() if name in parameters_of(single)}  # the rest is ignored
    if not is_known or not all(isinstance(value, _SETTINGS) for value in options.values()):
        return NotImplemented
    records.append(Recorded(GatedDelta(single, tuple(sorted(options.items()))), (*args, decay, beta)))
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
    """Whether a kernel of Mamba 2 rounds what a token adds to its state, asked by one token."""
    heads, width, size = 4, 64, 16
    dice = torch.Generator().manual_seed(0)
    x, dt, b = (torch.randn(shape, generator=dice).to(device, dtype) for shape in ((heads, width), (heads,), (size,)))
    state = torch.zeros(1, heads, width, size, device=device)
    told = [x[None], dt[None, :, None].expand(-1, -1, width), state.new_zeros(heads, width, size), b[None, None]]
    kernel(state, *told, b[None, None], None, z=None, dt_bias=state.new_zeros(heads, width), dt_softplus=False)
    rounded = (dt[:, None, None] * b) * x[..., None]
    exact = (dt.float()[:, None, None] * b.float()) * x.float()[..., None]
    far, near = ((state[0] - each.float()).abs().max() for each in (exact, rounded))
    return bool((near <= far).item())


_ANSWERS: dict[type, Callable[..., Any]] = {GatedDelta: _gated_delta, SelectiveScan: _selective_scan}


class KernelTape:
    """The kernels of one mixer's modeling file, intercepted while anybody holds them.

    Args:
        module: the file's.
        kernels: what its mixers call.
    """

    def __init__(self, module: Any, kernels: Kernels):
        self._module, self._kernels = module, kernels
        self._name = ("kernels", module.__name__, kernels.many)

    @classmethod
    def of(cls, mixer: nn.Module) -> KernelTape | None:
        """`None` where the mixer calls none that can be recorded."""
        kernels = kernels_of(mixer)
        return None if kernels is None else cls(sys.modules[type(mixer).__module__], kernels)

    def hold(self) -> None:
        """Intercept, until as many have let go."""
        CHANGES.hold(self._name, self._intercept)

    def let_go(self) -> None:
        """The last one leaves the file as it was."""
        CHANGES.let_go(self._name)

    @property
    def is_held(self) -> bool:
        """Whether calls of the kernel still pass by here: others may have replaced it since."""
        return hasattr(getattr(self._module, self._kernels.many), "is_taped")

    def _intercept(self) -> Callable[[], None]:
        module, kernels = self._module, self._kernels
        own = getattr(module, kernels.many)

        @functools.wraps(own)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            records = None if torch.compiler.is_compiling() else getattr(_running, "records", None)
            if records is not None:
                answer = _ANSWERS[kernels.recurrence]
                answered = answer(getattr(module, kernels.one), records, args, kwargs)
                if answered is not NotImplemented:
                    return answered
            return own(*args, **kwargs)

        kernel.is_taped = True  # type: ignore[attr-defined]
        setattr(module, kernels.many, kernel)
        return functools.partial(setattr, module, kernels.many, own)
