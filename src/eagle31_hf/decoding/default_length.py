"""How long drafts get where nobody asks for a length."""

from __future__ import annotations

from dataclasses import replace

from ..compiled.captured import CAPTURES
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.step_share import longest_worthwhile, step_share
from ..generation_config import COMPILED, COMPILED_SAMPLED, LONGEST_CHAIN, LONGEST_STEERED, DraftLength
from ..trees.shape import trees_pay
from .adaptive.acceptance_rates import Prior

FEWEST_LEVELS = 3
"""Of a tree of eight nodes that is worth more than a chain of as many steps."""


def default_length(
    drafter: Assistant, *, batch_size: int, sampled: bool, asked: int | None = None, compiled: bool | None = None
) -> DraftLength:
    """As `Eagle31GenerationConfig.draft_length`; captured chains go by what the pair's weights take to be read, and
    without a drafter chains are looked up."""
    if not isinstance(drafter, Eagle31Drafter):
        return _longest_lookup(drafter, asked, compiled=compiled)
    is_asked = asked is not None or drafter.generation_config.num_assistant_tokens is not None
    return drafter.generation_config.draft_length(
        device_type=drafter.device.type,
        batch_size=batch_size,
        sampled=sampled,
        asked=asked,
        compiled=compiled,
        by_graphs=None if is_asked or not compiled else _drafted_by_graphs(drafter, sampled=sampled),
    )


def _drafted_by_graphs(drafter: Eagle31Drafter, *, sampled: bool) -> DraftLength:
    """What pays where nobody asked; on a card by the weights that a step reads."""
    binding, usual, is_packed = drafter.binding, COMPILED_SAMPLED if sampled else COMPILED, False
    if drafter.device.type in CAPTURES:
        depth = longest_worthwhile(step_share(drafter), Prior().rate, longest=_longest_with_room(drafter))
        usual = DraftLength(depth) if depth < FEWEST_LEVELS else replace(usual, depth=depth)
        is_packed = getattr(binding.model, "hf_quantizer", None) is not None
    return usual if trees_pay(is_packed=is_packed, has_states=binding.has_states) else DraftLength(usual.depth)


def _longest_with_room(drafter: Eagle31Drafter) -> int:
    """Tokens of a draft that nobody asked for."""
    plan = drafter.memory_plan
    return LONGEST_STEERED if plan is None else min(LONGEST_STEERED, plan.settings.draft_tokens)


def _longest_lookup(assistant: Assistant, asked: int | None, *, compiled: bool | None) -> DraftLength:
    """Without a drafter; nothing is looked up by the schedule `"constant"`."""
    settings = assistant.generation_config
    if settings.num_assistant_tokens_schedule == "constant":
        return DraftLength(0)
    compiled = settings.acceleration == "compile" if compiled is None else compiled
    return DraftLength(asked or settings.num_assistant_tokens or (COMPILED.depth if compiled else LONGEST_CHAIN))
