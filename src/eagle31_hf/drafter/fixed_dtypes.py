"""Modules whose buffers keep their precision when the model around them changes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class KeepsBufferDtypes(nn.Module):
    """Mixed in before a module class: `.to(dtype)` moves its buffers but leaves their dtypes alone."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
