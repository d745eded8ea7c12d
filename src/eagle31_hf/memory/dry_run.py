"""What a forward of a model takes for each token, counted by running it without memory.

A stock model runs on the meta device over two numbers of tokens, and every storage is counted: what the longer run
takes more is what a token takes, whatever the family's layers are made of. Of layers alike the first two compute.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cache.state_tape import kernels_of
from ..cache.stock import read_stock_layers
from ..errors import MemoryPlanError, first_line
from .storage_counter import StorageCounter
from .weight_bytes import config_json, meta_model

FEW_TOKENS = (32, 64)
"""So few that what grows with their square does not count."""

KERNEL_TOKENS = (256, 512)
"""Where layers keep states: reference kernels read many tokens in chunks of up to 256."""

_FUSED = "eagle31_fused"
"""Name of attention that gives what a fused kernel gives: what else it takes depends on the text before."""


def _fused_attention(
    _module: nn.Module, query: Tensor, _key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any
) -> Any:
    batch, heads, tokens, _ = query.shape
    _sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


AttentionInterface.register(_FUSED, _fused_attention)
AttentionMaskInterface.register(_FUSED, sdpa_mask)  # some add up masks of their own


class ForwardBytes(NamedTuple):
    """Of a token in a forward over many, keys and values aside; and of a logit, 0 if in the model's precision."""

    token: int
    logit: int


def forward_bytes(config: PreTrainedConfig, element_bytes: int) -> ForwardBytes:
    """What a model of this configuration takes whose activations have `element_bytes`.

    Raises:
        MemoryPlanError: its forward does not run without memory, so it cannot be counted.
    """
    config_class: Any = type(config)
    found = _forward_bytes(config_class, config_json(config))
    return found._replace(token=found.token * element_bytes // 2)


@lru_cache(maxsize=32)
def _forward_bytes(config_class: Any, fields: str) -> ForwardBytes:
    """In bf16."""
    model: Any = meta_model(config_class, fields)
    for each in (model.config, model.config.get_text_config(decoder=True)):
        each._attn_implementation = _FUSED  # once made: some families make modules for those they know alone
    counts = KERNEL_TOKENS if any(kernels_of(module) for module in model.modules()) else FEW_TOKENS
    _skip_layers_alike(model)
    try:
        (few, _), (many, logit) = (_taken(model, tokens) for tokens in counts)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, KeyError, IndexError) as error:
        raise MemoryPlanError(
            f"what {type(model).__name__} takes cannot be counted without running it "
            f"({first_line(error)[:160]}); drafting works without a plan"
        ) from error
    return ForwardBytes((many - few) // (counts[1] - counts[0]), logit)


def _taken(model: Any, tokens: int) -> tuple[int, int]:
    """Most alive in a forward over so many tokens, keys and values aside, and bytes of a logit."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    # Some families give the logits of all tokens, and some look into a mask of their own making.
    ways: tuple[dict[str, Any], ...] = ({"logits_to_keep": 1}, {}, {"logits_to_keep": 1, "attention_mask": mask})
    for kwargs in ways:
        try:
            with torch.no_grad(), StorageCounter() as counter:
                output = model(ids, use_cache=True, **kwargs)
            break
        except (TypeError, RuntimeError):
            if kwargs is ways[-1]:
                raise
    layers, logits = read_stock_layers(cache_in(output)).values(), output.logits
    kept = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None)
    of_logits = 0 if "logits_to_keep" in kwargs else (tokens - 1) * logits[0, -1].nbytes
    logit = 0 if logits.dtype == torch.bfloat16 else logits.element_size()
    return counter.peak_bytes - of_logits - kept, logit


def cache_in(output: Any) -> Any:
    """The cache that a model has filled, whatever it calls it."""
    (cache,) = [value for value in output.values() if isinstance(value, Cache)]
    return cache


def _skip_layers_alike(model: Any) -> None:
    """Of layers of one type, with parameters of the same names and shapes, only the first two compute: all take the
    same, and in the second all is alive that is in later ones. None is skipped where layers use what others have made.
    """
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", None):
        return
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers: Any = next((each for each in lists if len(each) == text.num_hidden_layers), ())
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    seen: dict[Any, int] = {}
    width: dict[Any, int] = {}  # of the tuple that layers of a kind return; 0: a tensor

    def note(kind: Any, output: Any) -> None:
        width[kind] = 0 if isinstance(output, Tensor) else len(output)

    def skip(kind: Any, hidden_states: Any, *_args: Any, **_others: Any) -> Any:
        return (hidden_states, *[None] * (width[kind] - 1)) if width[kind] else hidden_states

    for layer, layer_type in zip(layers, types, strict=True):
        kind = layer_type, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] > 2:
            layer.forward = partial(skip, kind)
        else:
            layer.register_forward_hook(lambda _layer, _args, output, kind=kind: note(kind, output))
