"""What is changed in a target, or in the process, while texts are drafted, and changed back behind the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.backends import cuda


class SharedChanges:
    """Changes that several drafters and threads want at once, each by a name of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a change may bring others along, and garbage that is collected may let go
        self._held: dict[Hashable, tuple[int, Callable[[], object]]] = {}

    def hold(self, name: Hashable, change: Callable[[], Callable[[], object]]) -> None:
        """Make a change that is not held yet; `change` returns what undoes it."""
        with self._lock:
            holders, undo = self._held.get(name) or (0, change())
            self._held[name] = holders + 1, undo

    def let_go(self, name: Hashable) -> None:
        """The last one undoes the change."""
        with self._lock:
            holders, undo = self._held.pop(name)
            if holders > 1:
                self._held[name] = holders - 1, undo
            else:
                undo()

    @contextmanager
    def held(self, name: Hashable, change: Callable[[], Callable[[], object]]) -> Iterator[None]:
        """Hold while open."""
        self.hold(name, change)
        try:
            yield
        finally:
            self.let_go(name)


CHANGES = SharedChanges()
"""Those of this process."""


def leave_cudnn_out() -> Callable[[], None]:
    """Let SDPA not choose cuDNN's attention; for `SharedChanges`.

    cuDNN makes a plan for each shape it meets, and every round of a drafted text has keys of another length. torch
    prefers it on Hopper and Blackwell; 22 ms and 0.4 s were reported for a new shape. The choice is the process's, not
    a thread's: a plain `generate` beside a drafted one goes without cuDNN, too.
    """
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    return lambda: cuda.enable_cudnn_sdp(before)


class ReplacedForward:
    """A module's forward, replaced in the instance until `undo`. A copy or pickle of the model gets its own one back.

    Args:
        name: of the attribute that holds it.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], name: str = "forward"):
        self._module, self._forward, self._name = module, forward, name
        self._before = vars(module).get(name)
        vars(module)[name] = self  # a module's own bookkeeping of attributes costs more than a product of one token

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def undo(self) -> None:
        """Unless it was replaced once more since."""
        held = vars(self._module)
        if held.get(self._name) is not self:
            return
        if self._before is None:
            del held[self._name]
        else:
            held[self._name] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module, self._before)


def _own_forward(module: nn.Module, before: Callable[..., Any] | None) -> Callable[..., Any]:
    return before if before is not None else MethodType(type(module).forward, module)
