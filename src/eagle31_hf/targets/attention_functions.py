"""Does the target attend as SDPA does, so that SDPA may stand in for it while a text is drafted?

Drafts need additive masks, which flash and flex attention do not take: our loop has the target attend by SDPA instead,
which computes the same. What somebody registered with transformers' `AttentionInterface` or `AttentionMaskInterface`,
under a name of their own or a known one, may compute anything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .grouped_attention import grouped_attention_forward

ALIKE = (flash_attention_forward, flex_attention_forward, sdpa_attention_forward, grouped_attention_forward)
"""The last one is ours, which a target attends by while another thread drafts for it."""


def why_attention_is_unknown(model: PreTrainedModel) -> str | None:
    """Why SDPA may not stand in for the model's attention; `None` if it may.

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
