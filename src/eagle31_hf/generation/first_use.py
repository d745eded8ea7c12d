"""`import eagle31_hf` is quick: transformers is changed when it is first used, not when this package is imported.

A drafter can be given by its folder's name alone, so that no class of ours is touched before `generate` runs. Two
functions of transformers are therefore replaced as soon as their modules are there, by ones that call `hooks.install`
first and then do what they did.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ENTRANCES = {
    "transformers.generation.utils": ("GenerationMixin", "generate"),
    "transformers.pipelines.base": ("", "load_assistant_model"),
}
"""Module, class in it, and the function through which an assistant model comes in."""
_replaced: list[tuple[Any, str, Callable]] = []
_installing = threading.RLock()


def install_at_first_use() -> None:
    """Have `hooks.install` called by the first `generate` or `pipeline`, whenever transformers is imported."""
    for name in _ENTRANCES:
        if name in sys.modules:
            _replace_entrance(sys.modules[name])
    if not _ENTRANCES.keys() <= sys.modules.keys():
        sys.meta_path.insert(0, _EntranceFinder())


class _EntranceFinder:
    """Finds the modules of `_ENTRANCES` where Python would, and replaces their functions once they have run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _ENTRANCES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            _replace_entrance(module)

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace_entrance(module: ModuleType) -> None:
    in_class, name = _ENTRANCES[module.__name__]
    owner = getattr(module, in_class) if in_class else module
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def first(*args: Any, **kwargs: Any) -> Any:
        from .hooks import install

        with _installing:  # another thread may be installing
            _put_back()
            install()
        return getattr(owner, name)(*args, **kwargs)

    with _installing:
        _replaced.append((owner, name, stock))
        setattr(owner, name, first)


def _put_back() -> None:
    """What `hooks.install` is about to wrap is transformers' own."""
    while _replaced:
        owner, name, stock = _replaced.pop()
        setattr(owner, name, stock)
