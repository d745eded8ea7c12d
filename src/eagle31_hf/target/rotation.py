"""Does what rotates a position depend on the longest position of a forward? Asked of the rotary modules, by trying.

So it is with rope types "longrope" (Phi-3 with 128k) and "dynamic": up to some length all positions are rotated one
way, behind it another. A text is then another one if it is read in other pieces than plain `generate` reads it.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

LONGEST_TRIED = 2**24
"""Tokens. What changes beyond nobody reaches."""

ALIKE_AT_ANY_LENGTH = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})
"""Rope types whose frequencies are fixed: asked where a module cannot be tried."""


@torch.no_grad()
def rotates_alike_up_to(decoder: nn.Module) -> int | None:
    """Tokens of a text up to which its length makes no difference to any position; `None`: however long it is.

    Args:
        decoder: the part of a model that reads text.

    0: what rotates could not be found out. The modules are left as they are.
    """
    limits = [_limit(module) for module in _of_each_kind(_rotary_modules(decoder))]
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def rotations_left_alone(decoder: nn.Module) -> Iterator[None]:
    """Around forwards of ours that belong to no text.

    With rope type "dynamic" a text that begins behind the limit is rotated by the longest text since the last short
    one, also in plain `generate`. A short forward of ours in between would make it another text.
    """
    kept = [(module, module.__dict__) for module in _rotary_modules(decoder)]
    for module, _ in kept:
        module.__dict__ = _twin(module).__dict__
    try:
        yield
    finally:
        for module, held in kept:
            module.__dict__ = held


def _rotary_modules(decoder: nn.Module) -> list[nn.Module]:
    """Those that make angles of positions."""
    return [module for module in decoder.modules() if any(name.endswith("inv_freq") for name in module._buffers)]


def _of_each_kind(modules: list[nn.Module]) -> list[nn.Module]:
    """Of many that are alike, one."""
    found: dict[Any, nn.Module] = {}
    for module in modules:
        found.setdefault((type(module), id(getattr(module, "config", module)), str(_types(module))), module)
    return list(found.values())


def _limit(module: nn.Module) -> int | None:
    """Positions go in along one axis or three; some modules are asked by layer type."""
    by_type = getattr(module, "rope_type", None)
    typed = [list(by_type)] if isinstance(by_type, Mapping) and by_type else []
    for axes, layer_types in product((1, 3), (*typed, [None])):
        try:
            limits = [_first_longer(module, layer_type, axes) for layer_type in layer_types]
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
            continue  # it wants to be called in another way
        return min((limit for limit in limits if limit is not None), default=None)
    return None if set(_types(module)) <= ALIKE_AT_ANY_LENGTH else 0


def _first_longer(module: nn.Module, layer_type: str | None, axes: int) -> int | None:
    """By doubling, then by halving: from which length on position 1 is rotated otherwise, in tokens that may be had."""
    short = _angles(module, 1, layer_type, axes=axes)

    def differs(longest: int) -> bool:
        return not _same(short, _angles(module, longest, layer_type, axes=axes))

    longer = 2
    while not differs(longer):
        longer *= 2
        if longer > LONGEST_TRIED:
            return None
    return bisect_left(range(longer), True, lo=longer // 2 + 1, key=differs)  # positions 0 to one less


def _angles(module: nn.Module, longest: int, layer_type: str | None, *, axes: int) -> list[Tensor]:
    """What position 1 is rotated by in a forward whose longest position is `longest`."""
    twin = _twin(module)
    device = next(buffer.device for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq"))
    positions = torch.tensor([[1, longest]], device=device)
    if axes > 1:
        positions = positions.expand(axes, 1, 2)
    states = torch.zeros(1, 2, 2, device=device)  # says dtype and device
    out = twin(states, positions) if layer_type is None else twin(states, positions, layer_type)
    parts = out if isinstance(out, tuple) else (out,)
    return [part[..., 0, :] for part in parts]


def _twin(module: nn.Module) -> nn.Module:
    """A copy that may change its frequencies."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._buffers = {name: None if held is None else held.clone() for name, held in module._buffers.items()}
    return twin


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _types(module: nn.Module) -> list[str]:
    told = getattr(module, "rope_type", "default")
    return [str(each) for each in told.values()] if isinstance(told, Mapping) else [str(told)]
