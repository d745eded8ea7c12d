"""A target that is no longer the one its drafter learned from: the text stays right, the drafts may not. Said once."""

from __future__ import annotations

import logging
import sys
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

from ..checkpoints import TARGET_MODEL
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..target.binding import TargetBinding

logger = logging.getLogger(__name__)
_told: WeakKeyDictionary[TargetBinding, set[str]] = WeakKeyDictionary()


def tell_of_changes(drafter: Assistant) -> None:
    """Log, once for every target and change, that acceptance may have suffered and where to see whether it has."""
    binding = drafter.binding
    if not isinstance(drafter, Eagle31Drafter):
        return  # nothing has learnt from any target
    told = _told.setdefault(binding, set())
    for change in (_other_name(drafter, binding.model), _adapters(binding.model)):
        if change is not None and change not in told:
            told.add(change)
            logger.warning(
                "eagle31: %s; the text is the target's all the same, but drafts may be accepted less often: compare "
                "eagle.stats.acceptance_length with that of the drafter's card",
                change,
            )


def _other_name(drafter: Eagle31Drafter, model: Any) -> str | None:
    """The target is called otherwise than the one the drafter was made for, so far as both have names."""
    made_for = drafter.metadata.get(TARGET_MODEL)
    learned = made_for.get("name_or_path") if isinstance(made_for, dict) else made_for
    if not isinstance(learned, str) or not learned or not model.name_or_path:
        return None
    ours, theirs = (PurePath(name).name.casefold() for name in (learned, model.name_or_path))
    if ours in theirs or theirs in ours:  # "…-bnb-4bit" is the same model
        return None
    return f"the drafter was made for {learned}, the target is {model.name_or_path}"


def _adapters(model: Any) -> str | None:
    """Adapters (PEFT) that are at work in the target."""
    if "peft" not in sys.modules:  # then nobody has put one there
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    active = sorted({name for layer in layers if not layer.disable_adapters for name in layer.active_adapters})
    return f"adapters are at work in the target ({', '.join(active)})" if active else None
