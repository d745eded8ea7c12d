"""Reading and refilling a transformers `DynamicCache`: keys and values per layer, oldest token first.

A stock layer of `n` tokens holds the newest `k`: positions `[n - k, n)`, with `k = n` unless it slides.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedGenerationError

LayerStates = dict[int, tuple[Tensor, Tensor]]
"""Keys `(B, heads, k, Dk)` and values `(B, heads, k, Dv)` by layer index; layers without any are absent."""


def read_stock_layers(dynamic: DynamicCache, batch_size: int) -> LayerStates:
    """The states a stock cache holds, as they lie there.

    Raises:
        UnsupportedGenerationError: a layer is not a plain dynamic one (quantised, static, recurrent), or has not
            `batch_size` rows.
    """
    states: LayerStates = {}
    layers: list[Any] = dynamic.layers
    for index, layer in enumerate(layers):
        keys: Tensor | None = getattr(layer, "keys", None)
        is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        is_dummy = type(layer).__name__ == "DummyLayer"  # a class of the newer transformers only
        if is_dummy or (is_plain and (keys is None or keys.numel() == 0)):
            continue  # never written, as in layers that share another's keys and values
        if keys is None or not is_plain or len(keys) != batch_size:
            rows = "no" if keys is None else len(keys)
            raise UnsupportedGenerationError(
                f"got a past cache whose layer {index} is a {type(layer).__name__} of {rows} rows; wanted the layers "
                f"of a DynamicCache with {batch_size} rows: pass such a cache, or none"
            )
        states[index] = (keys, layer.values)
    return states


def refill_stock_layers(dynamic: DynamicCache, states: LayerStates, length: int) -> None:
    """Replace a stock cache's contents by rows of `length` tokens.

    Raises:
        UnsupportedGenerationError: only a window is left of a layer that the stock cache keeps whole. Nothing changed.
    """
    layers: list[Any] = dynamic.layers
    for index, (keys, _) in states.items():
        slides = index < len(layers) and isinstance(layers[index], DynamicSlidingWindowLayer)
        if keys.shape[2] < length and not slides:
            raise UnsupportedGenerationError(
                f"layer {index} holds the last {keys.shape[2]} of {length} tokens, the stock cache wants all of them; "
                "make it with DynamicCache(config=model.config)"
            )
    for index, (keys, values) in states.items():
        if index < len(layers):
            layers[index].lazy_initialization(keys, values)  # drops what the layer held
        dynamic.update(keys, values, index)
        if isinstance(layers[index], DynamicSlidingWindowLayer):
            layers[index].cumulative_length = length
