"""Keeping a plan: made for where the target sits, checked before the drafter's weights are read, set on its config."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import MemoryPlanError
from ..settings import Eagle31GenerationConfig
from .cards import Card, measure_card
from .plan import MemoryPlan
from .planner import plan_memory

logger = logging.getLogger(__name__)


def plan_to_apply(requested: MemoryPlan | Literal["auto"], target: PreTrainedModel | None, drafter: Any) -> MemoryPlan:
    """The plan a drafter is to be loaded under; refuses before its weights are read.

    Args:
        requested: a plan, or `"auto"` for one made here: this device, the context `target.generation_config` asks for,
            else 8,192 tokens or what the target was trained for, one row.
        target: loaded.
        drafter: folder, Hub id or configuration.

    Raises:
        MemoryPlanError: there is no target; the plan was made for another one, or has no room for a drafter; or not
            enough is free here, whatever card it was made for.
    """
    if target is None:
        got = repr(requested) if requested == "auto" else "a plan"
        raise MemoryPlanError(
            f"got memory={got} without a target; a plan is kept beside the target it was made for: pass target="
        )
    if requested != "auto" and not isinstance(requested, MemoryPlan):
        raise MemoryPlanError(f"got memory={requested!r}; wanted 'auto' or a plan of plan_memory(...)")
    card = measure_card(_device_of(target))
    if isinstance(requested, MemoryPlan):
        plan = requested
        plan.check_target(target)
    else:
        longest: Any = getattr(target.generation_config, "max_length", None)
        context = longest if isinstance(longest, int) and longest > 20 else None  # 20 is transformers' own
        plan = plan_memory(target, drafter=drafter, card=card, context=context)
    require_room(plan, card)
    return plan


def require_room(plan: MemoryPlan, card: Card) -> None:
    """Refuse a plan that has no drafter, or for which too little is free on the measured `card`.

    Raises:
        MemoryPlanError: with the largest terms of the ledger.
    """
    replace(plan, card=card).require_fit()  # a measured card's runtime is there already
    if not plan.settings.speculates:
        raise MemoryPlanError(
            f"this plan for {plan.target.name} on {card.name} leaves no room for a drafter at a context of "
            f"{plan.settings.context:,} tokens. {plan.largest_terms}Generate without one, or plan a shorter context"
        )


def apply_plan(plan: MemoryPlan, config: Eagle31GenerationConfig) -> None:
    """Set draft length or tree, prefill chunk and cache type as planned; a usual draft has room and stays unasked."""
    settings = plan.settings
    if not settings.draft_is_usual:
        config.num_assistant_tokens = settings.draft_tokens
        config.draft_top_k = settings.shape.top_k
        config.draft_tree_size = settings.tree_size
    elif settings.draft_top_k == 1:  # chains were asked for, of any length
        config.draft_top_k = 1
    config.prefill_chunk_size = settings.prefill_chunk
    config.cache_type = settings.cache_type
    if settings.cache_type != "full":
        logger.warning(
            "eagle31: the memory plan stores the target's cache as %s, which may change the text (docs/memory.md); "
            "plan with cache_type='full' or a shorter context if it must not",
            settings.cache_type,
        )


def _device_of(target: nn.Module) -> torch.device:
    """Where a target sits, which is one device."""
    devices = {parameter.device for parameter in target.parameters() if parameter.device.type != "meta"}
    if len(devices) != 1:
        found = ", ".join(sorted(str(device) for device in devices)) or "none"
        raise MemoryPlanError(
            f"the target's weights are on {found}; a memory plan is for one device: load the target on one, or leave "
            "memory= out"
        )
    return devices.pop()
