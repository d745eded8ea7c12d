"""How long drafts get where nobody asks for a length."""

from __future__ import annotations

from ..compiled.captured import CAPTURES
from ..drafter.drafter import Eagle31Drafter
from ..drafter.step_share import longest_worthwhile, step_share
from ..generation_config import LONGEST_STEERED, DraftLength
from .adaptive.acceptance_rates import Prior


def default_length(
    drafter: Eagle31Drafter, *, batch_size: int, sampled: bool, asked: int | None = None, compiled: bool | None = None
) -> DraftLength:
    """As `Eagle31GenerationConfig.draft_length`; captured chains go by what the pair's weights take to be read."""
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
