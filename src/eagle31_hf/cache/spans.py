"""How far back each layer of a model sees, read from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..errors import IncompatibleTargetError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NO_MIXER = ("moe", "mlp")
"""Layer types without a mixer. transformers 5.17 gives them a layer for states that is never written."""
_STOCK_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}


@dataclass(frozen=True)
class LayerKinds:
    """What each layer of a model keeps of the text.

    Attributes:
        windows: `None` (full attention, or no attention at all) or the sliding window in tokens, the query's own
            included.
        types: the key of each layer's mask for models that take a dict of masks; `None` for one tensor.
        num_states: recurrent and convolution states of each layer, 0 in layers of attention alone; default: none.
        attends: whether the layer attends, hence keeps keys and values; default: all do.
    """

    windows: Sequence[int | None]
    types: Sequence[str] | None = None
    num_states: Sequence[int] = ()
    attends: Sequence[bool] = ()


@dataclass(frozen=True)
class AttentionSpan:
    """A layer sees the last `window` positions, the query's own included, or everything (`None`).

    `chunked` (Llama 4): instead of sliding, the window restarts at every multiple of itself. A layer that does not
    attend has no mask.
    """

    window: int | None = None
    chunked: bool = False
    attends: bool = True

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
class LayerSpans:
    """One span per layer. `types` holds the mask's dict keys per layer, `None` for models that take one tensor."""

    spans: tuple[AttentionSpan, ...]
    types: tuple[str, ...] | None

    @classmethod
    def of(cls, kinds: LayerKinds, capacity: int) -> LayerSpans:
        """Of layers whose rows are no longer than `capacity`.

        A window no row can outgrow hides nothing, so such a layer counts as full: that is the cheaper storage, and
        the one that rolls back to any length.
        """
        windows, types = kinds.windows, kinds.types
        named = types if types is not None else [FULL] * len(windows)
        spans = tuple(
            AttentionSpan(window, kind == CHUNKED, attends)
            if window and window < capacity
            else AttentionSpan(attends=attends)
            for window, kind, attends in zip(windows, named, kinds.attends or [True] * len(windows), strict=True)
        )
        return cls(spans, tuple(types) if types is not None else None)

    @cached_property
    def by_mask(self) -> dict[str, AttentionSpan]:
        """The span behind each mask: one entry per layer type, or a single one, of the layers that attend."""
        if self.types is not None:
            return dict(zip(self.types, self.spans, strict=True))
        return {FULL: next((span for span in self.spans if span.attends), AttentionSpan(attends=False))}

    @cached_property
    def rings(self) -> set[int]:
        return {span.ring for span in self.spans if span.ring is not None}


def kinds_from_config(config: PreTrainedConfig, masks_by_type: bool | None, capacity: int) -> LayerKinds:
    """What the layers of a model keep, as transformers would cache it.

    Args:
        config: the model's configuration, or its text part.
        masks_by_type: whether the model takes a dict of masks; `None` means it does if the config has `layer_types`.
            Some configs carry `layer_types` their model never reads: then pass `False`.
        capacity: longest row to come.

    Raises:
        IncompatibleTargetError: a layer keeps something beside keys, values, recurrent and convolution states.
    """
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    stock = _stock_layers(config)
    named = list(types) if types is not None else [FULL] * len(stock)
    kept = list(zip(stock, named, strict=True))
    states = [0 if kind in NO_MIXER else getattr(layer, "number_of_states", 0) for layer, kind in kept]
    others = {kind for kind, count in zip(named, states, strict=True) if not count}
    unknown = sorted(others - {FULL, SLIDING, CHUNKED, *NO_MIXER})
    # What transformers itself would cache also tells models apart that name no layer types.
    unknown += sorted({type(layer).__name__ for layer in stock} - _STOCK_LAYERS)
    if unknown:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of kind {unknown}; drafts can be taken back in layers that keep keys and "
            f"values ({FULL}, {SLIDING} or {CHUNKED}) or recurrent and convolution states, and nothing else; generate "
            "without a drafter"
        )
    _refuse_scaling_by_slot(config, capacity)
    by_type = types is not None and masks_by_type is not False
    attends = [type(layer).__name__ != "LinearAttentionLayer" and kind not in NO_MIXER for layer, kind in kept]
    windows = _windows(config, stock, named, by_type=by_type)
    return LayerKinds(windows, named if by_type else None, states, attends)


def _stock_layers(config: PreTrainedConfig) -> list[Any]:
    """What transformers would cache in; some versions leave layers out that share another's keys and values."""
    layers: list[Any] = [*DynamicCache(config=config).layers]
    return layers + [DynamicLayer() for _ in range(config.num_hidden_layers - len(layers))]


def _windows(
    config: PreTrainedConfig, stock: Sequence[object], types: Sequence[str], *, by_type: bool
) -> list[int | None]:  # fmt: skip
    sliding, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if not by_type:
        return [sliding or None] * len(stock)
    windows = {FULL: None, SLIDING: sliding, CHUNKED: chunk}
    without = [kind for kind in (SLIDING, CHUNKED) if kind in types and not windows[kind]]
    if without:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of type {without} and no window for them (sliding_window={sliding}, "
            f"attention_chunk_size={chunk}); correct the target's config"
        )
    own = [getattr(layer, "sliding_window", None) for layer in stock]  # of types that both attend and keep states
    return [windows.get(kind, window) for kind, window in zip(types, own, strict=True)]


def _refuse_scaling_by_slot(config: PreTrainedConfig, capacity: int) -> None:
    """Llama 4 scales queries by slot instead of position; the scale is 1 below `floor_scale`."""
    floor_scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and floor_scale and capacity >= floor_scale:
        raise IncompatibleTargetError(
            f"{config.model_type} scales attention by slot from {floor_scale} tokens on, which is wrong for a tree; "
            f"got capacity={capacity}: keep prompt and new tokens below {floor_scale}"
        )
