"""How far back each layer of a model sees, read from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ..errors import ConfigurationError, IncompatibleTargetError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_STOCK_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


@dataclass(frozen=True)
class AttentionSpan:
    """A layer sees the last `window` positions, the query's own included, or everything (`None`).

    `chunked` (Llama 4): instead of sliding, the window restarts at every multiple of itself.
    """

    window: int | None = None
    chunked: bool = False

    @property
    def ring(self) -> int:
        """How many committed tokens a later query may still see at most."""
        assert self.window is not None
        return max(self.window - 1, 1)

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
    def from_windows(cls, windows: Sequence[int | None], types: Sequence[str] | None, capacity: int) -> LayerSpans:
        """Spans of layers with these windows.

        A window no row can outgrow hides nothing, so such a layer counts as full: that is the cheaper storage, and
        the one that rolls back to any length.

        Raises:
            ConfigurationError: layers that must share one mask differ in their window.
        """
        if types is not None and len(types) != len(windows):
            raise ConfigurationError(f"got {len(types)} layer types for {len(windows)} layer windows; wanted one each")
        kinds = list(types) if types is not None else [FULL] * len(windows)
        spans = tuple(
            AttentionSpan(window, kind == CHUNKED) if window and window < capacity else AttentionSpan()
            for window, kind in zip(windows, kinds, strict=True)
        )
        for kind in dict.fromkeys(kinds):
            distinct = {span for span, other in zip(spans, kinds, strict=True) if other == kind}
            if len(distinct) > 1:
                windows_found = sorted(str(span.window) for span in distinct)
                raise ConfigurationError(
                    f"layers that share one attention mask have windows {windows_found}; wanted one window per mask: "
                    "pass layer_types to give each kind of layer its own"
                )
        return cls(spans, tuple(types) if types is not None else None)

    @cached_property
    def by_mask(self) -> dict[str, AttentionSpan]:
        """The span behind each mask: one entry per layer type, or a single one."""
        return dict(zip(self.types or [FULL], self.spans, strict=self.types is not None))

    @cached_property
    def rings(self) -> set[int]:
        return {span.ring for span in self.spans if span.window is not None}


def windows_from_config(
    config: PreTrainedConfig, masks_by_type: bool | None, capacity: int
) -> tuple[list[int | None], list[str] | None]:  # fmt: skip
    """Windows and, where masks go by layer type, types of a model's layers.

    Args:
        config: the model's configuration, or its text part.
        masks_by_type: whether the model takes a dict of masks; `None` means it does if the config has `layer_types`.
            Some configs carry `layer_types` their model never reads: then pass `False`.
        capacity: longest row to come.

    Raises:
        IncompatibleTargetError: a layer keeps a state that follows the order of slots (recurrent, convolution) or
            needs more than keys and values.
    """
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    _refuse_unsupported(config, capacity)
    if masks_by_type is None:
        masks_by_type = types is not None
    sliding, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if not masks_by_type or types is None:
        return [sliding or None] * config.num_hidden_layers, None
    windows = {FULL: None, SLIDING: sliding, CHUNKED: chunk}
    without = [kind for kind in (SLIDING, CHUNKED) if kind in types and not windows[kind]]
    if without:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of type {without} and no window for them (sliding_window={sliding}, "
            f"attention_chunk_size={chunk}); correct the target's config"
        )
    return [windows[kind] for kind in types], list(types)


def unknown_layers(config: PreTrainedConfig) -> list[str]:
    """Kinds of a model's layers that may keep more than keys and values; nobody here knows how to roll them back."""
    config = config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING, CHUNKED})
    # What transformers itself would cache also tells models apart that name no layer types.
    return unknown + sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - _STOCK_LAYERS)


def _refuse_unsupported(config: PreTrainedConfig, capacity: int) -> None:
    unknown = unknown_layers(config)
    if unknown:
        raise IncompatibleTargetError(
            f"{config.model_type} has layers of kind {unknown}; draft trees need attention layers that keep keys and "
            f"values only ({FULL}, {SLIDING} or {CHUNKED}); generate without a drafter"
        )
    # Llama 4 scales queries by slot instead of position; the scale is 1 below `floor_scale`.
    floor_scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and floor_scale and capacity >= floor_scale:
        raise IncompatibleTargetError(
            f"{config.model_type} scales attention by slot from {floor_scale} tokens on, which is wrong for a tree; "
            f"got capacity={capacity}: keep prompt and new tokens below {floor_scale}"
        )
