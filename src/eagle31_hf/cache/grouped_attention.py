"""Attention that reads keys and values once where a group of query heads shares them.

SDPA's kernels take a mask only where queries have as many heads as keys, so transformers copies keys and values to all
query heads. Here the queries of a group are rows of one head instead: `(B, H, T, D)` is seen as `(B, H_kv, G*T, D)`
with the mask's rows repeated for each, and keys stay where they are. Long prompts, whose masks are larger than that is
worth, go through one kernel for each query head of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..drafting.shape import repeats_mask
from .attention_in_parts import MASK_ALIGNMENT, attention_in_parts, finite, useful_parts
from .shared_changes import CHANGES

GROUPED = "eagle31_grouped"
"""The name by which transformers knows this attention."""


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """SDPA of `query` `(B, H, T, D)` over `key` and `value` `(B, H_kv, S, D)`; `(B, H, T, D)`.

    Args:
        mask: `(1 or B, 1 or H, T, S)`, additive or bool; `None`: one query sees everything, several see themselves and
            what is before them, and no more keys than queries.
        scale: of scores; default: one over the root of `D`.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups, causal = heads // kv_heads, mask is None and length > 1
    if groups == 1 or causal:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    if mask is not None and not repeats_mask(length, kv_heads, groups, width):
        return _head_after_head(query, key, value, mask, scale)
    rows = query.reshape(batch, kv_heads, groups * length, width)
    parts = useful_parts(rows, key, value)
    if mask is not None:
        mask = _repeated_for(groups, finite(mask, query.dtype) if parts > 1 else mask, kv_heads)
    if parts > 1:
        out = attention_in_parts(rows, key, value, mask, parts, scale=scale)
    else:
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, length, -1)


class WatchedCache(DynamicCache):
    """A cache that is shown who reads it."""

    def see(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, layer_idx: int) -> None:
        """Before `query` `(B, n, T, d)` attends to all keys of a layer, `(B, n_kv, S, d)`."""
        raise NotImplementedError


def _repeated_for(groups: int, mask: Tensor, kv_heads: int) -> Tensor:
    """The mask of rows `(1 or B, 1 or H_kv, G*T, S)`."""
    if mask.shape[1] > 1:
        return _by_group(mask, kv_heads).flatten(2, 3)
    slots = mask.shape[3]
    if mask.is_cuda and slots % MASK_ALIGNMENT:  # else SDPA pads what is repeated
        mask = F.pad(mask, (0, -slots % MASK_ALIGNMENT))
    return mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)[..., :slots]


def _by_group(heads: Tensor, kv_heads: int) -> Tensor:
    """`(B, H, ...)` as `(B, H_kv, G, ...)`."""
    return heads.unflatten(1, (kv_heads, -1))


def _head_after_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """The first head of every group, then the second: nothing is copied, and so many queries fill a card anyway."""
    queries = _by_group(query, key.shape[1])  # (B, H_kv, G, T, D)
    masks = _by_group(mask, key.shape[1]) if mask.shape[1] > 1 else mask[:, :, None]
    out = query.new_empty(*queries.shape[:4], value.shape[3])
    for head in range(queries.shape[2]):
        seen = masks[:, :, min(head, masks.shape[2] - 1)]
        out[:, :, head] = F.scaled_dot_product_attention(queries[:, :, head], key, value, attn_mask=seen, scale=scale)
    return out.flatten(1, 2)


# --- in a target ------------------------------------------------------------------------------------------------------


def grouped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for `GROUPED`: its own attention by SDPA but where that would copy keys and values."""
    is_masked = attention_mask is not None and attention_mask.shape[2:] == (query.shape[2], key.shape[2])
    if not is_masked or dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    out = grouped_attention(query, key, value, attention_mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def decoder_of(model: Any) -> Any:
    """The part of a model that reads text: no LM head, and no tower beside it that reads pictures."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


@contextmanager
def attending_grouped(model: PreTrainedModel) -> Iterator[None]:
    """While open in any thread, the model attends to text by `GROUPED` if it does so by SDPA."""
    config = model.config.get_text_config()

    def attend(name: str) -> None:
        config._attn_implementation_internal = name  # of this config alone, not of those within it

    def change() -> Callable[[], None]:
        attend(GROUPED)
        return partial(attend, "sdpa")

    # Whether its code looks attention up by name, as that of all but a few does.
    by_name = getattr(type(decoder_of(model)), "_can_set_attn_implementation", bool)()
    served = by_name and config._attn_implementation in ("sdpa", GROUPED)
    with CHANGES.held(("grouped", id(config)), change) if served else nullcontext():
        yield


ALIKE = (flash_attention_forward, flex_attention_forward, sdpa_attention_forward, grouped_attention_forward)
"""Attention that SDPA may stand in for while a text is drafted; the last is ours, used while another thread drafts."""


def why_attention_is_unknown(model: PreTrainedModel) -> str | None:
    """Why SDPA may not stand in for the model's attention; `None` if it may.

    Drafts need additive masks, which flash and flex attention do not take. What was registered with transformers'
    `AttentionInterface` or `AttentionMaskInterface`, under a new name or a known one, may compute anything.

    Asked of every call: a model's attention can be exchanged, and a name registered anew, at any time.
    """
    for config in (model.config, model.config.get_text_config()):
        name = config._attn_implementation
        if not _is_known(name):
            return (
                f"the target attends by {name!r}, which was registered from outside transformers (or is not plain "
                "attention) and need not compute what SDPA computes for drafts"
            )
    return None


def _is_known(name: str | None) -> bool:
    """Whether both what attends and what masks under this name are transformers' own, of the kind that SDPA is."""
    attention, mask = _under(ALL_ATTENTION_FUNCTIONS, name), _under(ALL_MASK_ATTENTION_FUNCTIONS, name)
    attends = name in (None, "eager") if attention is None else any(attention is each for each in ALIKE)
    masks = name is None if mask is None else any(mask is each for each in vars(masking_utils).values())
    return attends and masks


def _under(interface: Any, name: str | None) -> Any:
    """The function registered under a name, without the arguments that were bound to it (kernels from the Hub)."""
    found = None if name is None else interface.get(name)
    return found.func if isinstance(found, partial) else found
