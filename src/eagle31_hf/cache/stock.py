"""Reading and refilling a transformers `DynamicCache`: keys, values and states per layer, oldest token first.

A stock layer of `n` tokens holds the newest `k`: positions `[n - k, n)`, with `k = n` unless it slides. Of states it
holds those after its last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ..errors import UnsupportedGenerationError
from .spans import STOCK_LAYERS, is_dummy
from .states import CONVOLUTION, RECURRENT, StateKey

# transformers 5.24 renamed `past_key_values` to `cache`, in arguments of models and of `generate` and in outputs; until
# 5.40 models still take the old name, with a warning.
_OLD, _NEW = "past_key_values", "cache"
CACHE_ARGUMENT = _NEW if _NEW in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD
"""The name by which transformers hands a model its cache."""


@dataclass(frozen=True)
class HeldLayer:
    """What a layer holds of its rows: keys `(B, heads, k, Dk)`, values `(B, heads, k, Dv)`, states `(B, ...)`."""

    keys: Tensor | None = None
    values: Tensor | None = None
    states: Mapping[StateKey, Tensor] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.keys is None and not self.states

    @property
    def num_tokens(self) -> int | None:
        """Tokens whose keys are held; `None`: no keys are."""
        return None if self.keys is None else self.keys.shape[2]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.states.values())) if self.keys is None else self.keys)


LayerStates = dict[int, HeldLayer]
"""What layers hold, by layer index; layers that hold nothing are absent."""


def held_length(dynamic: DynamicCache) -> int:
    """Tokens a stock cache holds. One without any attention does not count them; ours remember their text.

    Raises:
        UnsupportedGenerationError: it holds states of a text of unknown length.
    """
    layers: list[Any] = list(getattr(dynamic, "layers", ()))
    with_states = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not with_states or any(isinstance(layer, CacheLayerMixin) for layer in dynamic.layers):
        return dynamic.get_seq_length()
    if not any(any(layer.has_previous_state.values()) for layer in with_states):
        return 0
    state = getattr(dynamic, "eagle31_state", None)
    if state is None:
        raise UnsupportedGenerationError(
            "got a past cache of states alone, which does not say how many tokens it holds; pass the whole text and an "
            "empty cache, or one that a generation with a drafter has filled"
        )
    return state.length


def read_stock_layers(dynamic: DynamicCache, batch_size: int | None = None) -> LayerStates:
    """What a stock cache holds, as it lies there.

    Raises:
        UnsupportedGenerationError: a layer is not a plain dynamic one (quantised, static), or has other than
            `batch_size` rows, if that is given.
    """
    held: LayerStates = {}
    layers: list[Any] = dynamic.layers
    for index, layer in enumerate(layers):
        if is_dummy(layer):
            continue
        content = _content(layer) if type(layer) in STOCK_LAYERS else None
        if content is not None and content.is_empty:
            continue  # never written, as in layers that share another's keys and values
        if content is None or batch_size not in (None, content.num_rows):
            rows = "no" if content is None else content.num_rows
            wanted = "" if batch_size is None else f" with {batch_size} rows"
            raise UnsupportedGenerationError(
                f"got a past cache whose layer {index} is a {type(layer).__name__} of {rows} rows; wanted the layers "
                f"of a DynamicCache{wanted}: pass such a cache, or none"
            )
        held[index] = content
    return held


def _content(layer: Any) -> HeldLayer:
    keys: Tensor | None = getattr(layer, "keys", None)
    states = {
        (kind, number): state
        for kind in (CONVOLUTION, RECURRENT)
        for number, state in getattr(layer, kind, {}).items()
        if state is not None and layer.has_previous_state[number]
    }
    return HeldLayer(states=states) if keys is None or keys.numel() == 0 else HeldLayer(keys, layer.values, states)


def refill_stock_layers(dynamic: DynamicCache, held: LayerStates, length: int) -> None:
    """Fill an empty stock cache, made for these layers, with rows of `length` tokens."""
    layers: list[Any] = dynamic.layers
    for index, content in held.items():
        if content.keys is not None:
            dynamic.update(content.keys, content.values, index)  # type: ignore[arg-type]
            if isinstance(layers[index], DynamicSlidingWindowLayer):
                layers[index].cumulative_length = length
        if content.states:
            _refill_states(layers[index], content.states)


def _refill_states(layer: Any, states: Mapping[StateKey, Tensor]) -> None:
    layer.record_past = False
    for (kind, number), state in states.items():
        layer.lazy_initialization(**{kind: state, "state_idx": number})
        getattr(layer, kind)[number].copy_(state)
    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
