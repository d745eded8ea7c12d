"""What each layer of a model keeps of the text and how far back it sees, read from the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..errors import IncompatibleTargetError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NO_MIXER = ("moe", "mlp")
"""Layer types without a mixer. transformers 5.17 gives them a layer for states that is never written."""

STOCK_LAYERS = (
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer,
)  # fmt: skip
"""Layers of a stock cache whose contents we can hold."""


def is_dummy(layer: Any) -> bool:
    """Whether a layer of a stock cache holds nothing; the class is of newer versions of transformers only."""
    return type(layer).__name__ == "DummyLayer"


@dataclass(frozen=True)
class LayerKind:
    """What one layer keeps of the text.

    Attributes:
        window: it sees so many positions back, the query's own included; `None`: everything.
        chunked: instead of sliding, the window restarts at every multiple of itself (Llama 4).
        attends: whether it attends, hence keeps keys and values and has a mask.
        num_states: how many recurrent and convolution states it keeps.
    """

    window: int | None = None
    chunked: bool = False
    attends: bool = True
    num_states: int = 0

    @property
    def ring(self) -> int | None:
        """How many committed tokens a later query may still see at most. `None`: all."""
        return None if self.window is None else max(self.window - 1, 1)

    def reaches(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether a query sees a key at an earlier or equal position. `(B, T, 1)`, `(B, 1, K)` -> bool `(B, T, K)`."""
        assert self.window is not None
        if self.chunked:
            return query_positions // self.window == key_positions // self.window
        return query_positions - key_positions < self.window


@dataclass(frozen=True)
class LayerKinds:
    """Those of a model's layers.

    Attributes:
        layers: one of each.
        types: the key of each layer's mask for models that take a dict of masks; `None` for one tensor.
    """

    layers: tuple[LayerKind, ...]
    types: tuple[str, ...] | None = None

    def within(self, capacity: int) -> LayerKinds:
        """The same for rows that are no longer than `capacity`.

        A window no row can outgrow hides nothing, so such a layer counts as full: that is the cheaper storage, and
        the one that rolls back to any length.
        """

        def narrowed(kind: LayerKind) -> LayerKind:
            return kind if kind.window and kind.window < capacity else replace(kind, window=None, chunked=False)

        return replace(self, layers=tuple(map(narrowed, self.layers)))

    @cached_property
    def by_mask(self) -> dict[str, LayerKind]:
        """The kind of layer behind each mask: one entry per layer type, or a single one, of the layers that attend."""
        if self.types is not None:
            return dict(zip(self.types, self.layers, strict=True))
        return {FULL: next((kind for kind in self.layers if kind.attends), LayerKind(attends=False))}

    @cached_property
    def rings(self) -> set[int]:
        return {kind.ring for kind in self.layers if kind.ring is not None}


def kinds_from_config(config: PreTrainedConfig, masks_by_type: bool | None = None) -> LayerKinds:
    """What the layers of a model keep, as transformers would cache it.

    Args:
        config: the model's configuration, or its text part.
        masks_by_type: whether the model takes a dict of masks; `None` means it does if the config has `layer_types`.
            Some configs carry `layer_types` their model never reads: then pass `False`.

    Raises:
        IncompatibleTargetError: a layer keeps something beside keys, values, recurrent and convolution states.
    """
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    stock: list[Any] = [*DynamicCache(config=config).layers]
    # Some versions leave layers out that share another's keys and values.
    stock += [DynamicLayer() for _ in range(config.num_hidden_layers - len(stock))]
    named = list(types) if types is not None else [FULL] * len(stock)
    by_type = types is not None and masks_by_type is not False
    sliding, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    windows = {FULL: None, SLIDING: sliding, CHUNKED: chunk} if by_type else dict.fromkeys(named, sliding or None)
    layers, unknown = [], set[str]()
    for layer, kind in zip(stock, named, strict=True):
        own_window = getattr(layer, "sliding_window", None)  # of types that both attend and keep states
        attends = kind not in NO_MIXER and type(layer) is not LinearAttentionLayer
        num_states = 0 if kind in NO_MIXER else getattr(layer, "number_of_states", 0)
        layers.append(LayerKind(windows.get(kind, own_window), by_type and kind == CHUNKED, attends, num_states))
        if not num_states and kind not in (FULL, SLIDING, CHUNKED, *NO_MIXER):
            unknown.add(kind)
        if type(layer) not in STOCK_LAYERS and not is_dummy(layer):  # it tells models apart that name no types
            unknown.add(type(layer).__name__)
    if unknown:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of kind {sorted(unknown)}; drafts can be taken back in layers that keep "
            f"keys and values ({FULL}, {SLIDING} or {CHUNKED}) or recurrent and convolution states, and nothing else; "
            "generate without a drafter"
        )
    without = [kind for kind in (SLIDING, CHUNKED) if by_type and kind in named and not windows[kind]]
    if without:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of type {without} and no window for them (sliding_window={sliding}, "
            f"attention_chunk_size={chunk}); correct the target's config"
        )
    return LayerKinds(tuple(layers), tuple(named) if by_type else None)


def refuse_scaling_by_slot(config: PreTrainedConfig, capacity: int) -> None:
    """Llama 4 scales queries by slot instead of position; the scale is 1 below `floor_scale`.

    Raises:
        IncompatibleTargetError: rows of `capacity` tokens reach it.
    """
    config = config.get_text_config(decoder=True)
    floor_scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and floor_scale and capacity >= floor_scale:
        raise IncompatibleTargetError(
            f"{config.model_type} scales attention by slot from {floor_scale} tokens on, which is wrong for a tree; "
            f"got capacity={capacity}: keep prompt and new tokens below {floor_scale}"
        )
