"""Up to which length a text's positions mean the same: by rope types that go by it, and by tables that end.

With rope types "longrope" (Phi-3 with 128k) and "dynamic" all positions of a forward are rotated by its longest one: up
to some length one way, behind it another. A text is then another one if it is read in other pieces than plain
`generate` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

ALIKE_AT_ANY_LENGTH = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})
"""Rope types whose frequencies are fixed."""

OFFSETS = 8
"""Most entries of a table that come before position 0 (OPT: 2)."""


def rotates_alike_up_to(decoder: nn.Module) -> int | None:
    """Tokens of a text up to which its length makes no difference to any position; `None`: however long it is.

    Args:
        decoder: the part of a model that reads text.

    0: a rope type that is not known.
    """
    limits = [_limit(module, kind, of) for module in _rotary_modules(decoder) for of, kind in _types(module).items()]
    return min((limit for limit in limits if limit is not None), default=None)


def most_positions(decoder: nn.Module, config: Any) -> int | None:
    """Positions in a decoder's table, learned ones (GPT-2, OPT) or sines (GPT-J); `None`: it has none.

    Args:
        decoder: the part of a model that reads text.
        config: of that part.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    named = chain(decoder.named_parameters(), decoder.named_buffers())
    tables = [held for name, held in named if held.dim() == 2 and ("wpe" in name or "pos" in name)]
    return longest if any(longest <= len(table) <= longest + OFFSETS for table in tables) else None


@contextmanager
def rotations_left_alone(decoder: nn.Module) -> Iterator[None]:
    """Around forwards of ours that belong to no text.

    With rope type "dynamic" a text that begins behind the limit is rotated by the longest text since the last short
    one, also in plain `generate`. A short forward of ours in between would make it another text.
    """
    kept = [(module, module.__dict__) for module in _rotary_modules(decoder)]
    for module, held in kept:
        buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
        module.__dict__ = {**held, "_buffers": buffers}
    try:
        yield
    finally:
        for module, held in kept:
            module.__dict__ = held


def _rotary_modules(decoder: nn.Module) -> list[nn.Module]:
    """Those that make angles of positions."""
    return [module for module in decoder.modules() if any(name.endswith("inv_freq") for name in module._buffers)]


def _types(module: nn.Module) -> dict[str | None, str]:
    """Rope types of a module, by the layer types that it tells apart."""
    kind = getattr(module, "rope_type", "default")
    return {of: str(each) for of, each in kind.items()} if isinstance(kind, Mapping) else {None: str(kind)}


def _limit(module: Any, kind: str, layer_type: str | None) -> int | None:
    if kind in ALIKE_AT_ANY_LENGTH:
        return None
    if "dynamic" in kind:
        return getattr(module, "original_max_seq_len", 0)
    if kind != "longrope":
        return 0
    config = getattr(module, "config", None)
    fields = getattr(config, "rope_parameters", None) or {}
    fields = fields if layer_type is None else fields.get(layer_type) or {}
    name = "original_max_position_embeddings"
    return fields.get(name) or getattr(config, name, 0)
