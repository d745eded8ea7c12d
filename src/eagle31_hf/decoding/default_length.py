"""How long drafts get where nobody asks for a length."""

from __future__ import annotations

from ..compiled.captured import CAPTURES
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.step_share import longest_worthwhile, step_share
from ..generation_config import COMPILED_DEPTH, LONGEST_CHAIN, LONGEST_STEERED, DraftLength
from .adaptive.acceptance_rates import Prior


def default_length(
    drafter: Assistant, *, batch_size: int, sampled: bool, asked: int | None = None, compiled: bool | None = None
) -> DraftLength:
    """As `Eagle31GenerationConfig.draft_length`; captured chains go by what the pair's weights take to be read, and
    without a drafter chains are looked up."""
    if not isinstance(drafter, Eagle31Drafter):
        return _longest_lookup(drafter, asked, compiled=compiled)
    is_asked = asked is not None or drafter.generation_config.num_assistant_tokens is not None
    captured = None
    if compiled and not is_asked and drafter.device.type in CAPTURES:
        captured = longest_worthwhile(step_share(drafter), Prior().rate, longest=LONGEST_STEERED)
    return drafter.generation_config.draft_length(
        device_type=drafter.device.type,
        batch_size=batch_size,
        sampled=sampled,
        asked=asked,
        compiled=compiled,
        captured_depth=captured,
    )


def _longest_lookup(assistant: Assistant, asked: int | None, *, compiled: bool | None) -> DraftLength:
    """Without a drafter; nothing is looked up by the schedule `"constant"`."""
    settings = assistant.generation_config
    if settings.num_assistant_tokens_schedule == "constant":
        return DraftLength(0)
    compiled = settings.acceleration == "compile" if compiled is None else compiled
    return DraftLength(asked or settings.num_assistant_tokens or (COMPILED_DEPTH if compiled else LONGEST_CHAIN))
