"""Containers that stay behind when what holds them is copied or pickled: the twin has an empty one."""

from __future__ import annotations

from typing import Any


class _NotCopied:
    def __deepcopy__(self, memo: dict) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class NotCopiedList(_NotCopied, list):
    """A list that is left behind."""


class NotCopiedDict(_NotCopied, dict):
    """A dict that is left behind."""
