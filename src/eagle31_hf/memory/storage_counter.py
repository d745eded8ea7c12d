"""Bytes of storages as they come and go: what eager PyTorch allocates, for real tensors and for those without memory.

On a machine without a card this sees what a computation takes, to within half a percent of the CPU allocator's own
log. It cannot see workspaces inside kernels, nor tensors that no operation has made (a file mapped into memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..cache.torch_internals import TorchDispatchMode

_MADE_OUTSIDE = (torch.ops.aten.lift_fresh.default,)
"""Operations whose input is new: `torch.tensor([...])` passes its storage through this one first."""


class StorageCounter(TorchDispatchMode):
    """Counts storages born while active: `live_bytes` now, `peak_bytes` at most since the last restart.

    What was there before, weights for instance, is not counted.

    Attributes:
        steps: `live_bytes` behind each storage that was born since the last restart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.steps: list[int] = []
        self._known: set[int] = set()

    def restart_peak(self) -> None:
        self.peak_bytes, self.steps = self.live_bytes, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes in was there before, or was counted when it was made.
        taken = () if func in _MADE_OUTSIDE else _tensors_in((args, kwargs))
        old = {tensor.untyped_storage()._cdata for tensor in taken}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(out):
            if tensor.untyped_storage()._cdata not in old:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.steps.append(self.live_bytes)
        weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Of an operation's arguments or outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)
