"""A cache beside plain lists: what a reader must get of it, rounded where it stores 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from eagle31_hf.cache.quantized import decode, encode
from eagle31_hf.cache.spans import LayerKind, LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 5


def rounded(states: Tensor) -> Tensor:
    return decode(*encode(states))


@cache
def vectors_of_token(seed: int, width: int) -> Tensor:
    """`(heads, width)`, large ones and small ones."""
    dice = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-3, 3, (HEADS, 1), generator=dice)
    return torch.randn(HEADS, width, generator=dice) * size


def layer_kinds(windows: Sequence[int | None], types: Sequence[str] | None = None) -> LayerKinds:
    """Of layers that see so far back, by the masks of `types`; default: one for windows, one for none."""
    named = types or ["sliding_attention" if window else "full_attention" for window in windows]
    kinds = [LayerKind(window, kind == "chunked_attention") for window, kind in zip(windows, named, strict=True)]
    return LayerKinds(tuple(kinds), tuple(named))


@dataclass
class Mirror:
    """The cache beside plain lists: per row the tokens it holds, per token the vectors a reader must get."""

    windows: list[int | None]
    batch_size: int = 1
    cache_type: str = "int8"
    slab: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    cache: SpeculativeCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = SpeculativeCache(
            layer_kinds(self.windows),
            batch_size=self.batch_size,
            capacity=96,
            block=8,
            slab=self.slab,
            cache_type=self.cache_type,
        )
        self.rows: list[list[int]] = [[] for _ in range(self.batch_size)]  # tokens, by number
        self.next_token = 1

    def states(self, tokens: Tensor, layer: int, width: int) -> Tensor:
        """Random vectors `(B, heads, T, width)` that follow from token and layer alone."""
        seed = self.seed * 10_000_019 + layer * 11 + width
        made = [[vectors_of_token(seed + int(token) * 101, width) for token in row] for row in tokens]
        return torch.stack([torch.stack(row, 1) for row in made]).to(self.dtype)

    def as_read(self, states: Tensor) -> Tensor:
        return states if self.cache_type == "full" else rounded(states)

    def write(self, num_tokens: int, after: int = 0, tokens: Tensor | None = None) -> Tensor:
        """Write tokens `(B, T)`, new ones unless given, through every layer; check what a reader of them gets."""
        if tokens is None:
            size = self.batch_size * num_tokens
            tokens = torch.arange(self.next_token, self.next_token + size).view(-1, num_tokens)
            self.next_token += size
        self.cache.place(tokens.shape[1], after=after)
        for layer in range(len(self.windows)):
            keys, values = self.states(tokens, layer, KEY_DIM), self.states(tokens, layer, VALUE_DIM)
            for seen, written in zip(self.cache.update(keys, values, layer), (keys, values), strict=True):
                wanted = self.as_read(written)
                for b, length in enumerate(self.cache.lengths):
                    window = self.windows[layer]
                    first = (length if window is None else window - 1) + after
                    assert torch.equal(seen[b, :, first : first + tokens.shape[1]], wanted[b])
        return tokens

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows] == self.cache.placement.lengths_tensor.tolist()
        for index, (layer, window) in enumerate(zip(self.cache.layers, self.windows, strict=True)):
            if not layer.is_initialized:
                continue
            for b, row in enumerate(self.rows):
                newest = row if window is None else row[max(0, len(row) - (window - 1)) :]
                for held, width in zip(layer.held(len(row), b), (KEY_DIM, VALUE_DIM), strict=True):
                    assert held.shape == (1, HEADS, len(newest), width)
                    if newest:
                        states = self.states(torch.tensor([newest]), index, width)
                        assert torch.equal(held, self.as_read(states))

    def select(self, picked: list[int]) -> None:
        self.cache.select_rows(picked)
        self.rows, self.batch_size = [list(self.rows[b]) for b in picked], len(picked)

    def keep(self, tokens: Tensor, paths: list[list[int]]) -> None:
        """Of the tokens `(B, T)` just written, each row's path."""
        self.cache.keep(paths)
        self.rows = [row + tokens[b, path].tolist() for b, (row, path) in enumerate(zip(self.rows, paths, strict=True))]

    def commit(self, tokens: Tensor, counts: list[int]) -> None:
        self.cache.commit(counts)
        self.rows = [row + new[:n].tolist() for row, new, n in zip(self.rows, tokens, counts, strict=True)]

    def reset(self) -> None:
        self.cache.reset()
        self.rows = [[] for _ in self.rows]
