"""How long a call's drafts may get: asked by both loops."""

from __future__ import annotations

from transformers import GenerationConfig

from ..decoding.default_length import default_length
from ..drafter.assistant import Assistant
from ..generation_config import DraftLength


def draft_length(
    drafter: Assistant, generation_config: GenerationConfig, *, batch_size: int, compiled: bool | None = None
) -> DraftLength:
    """How long drafts may get: what the `generate` call asks for, else the drafter's own settings.

    `generate` fills an unset `num_assistant_tokens` with transformers' default before we see it, so that one value
    counts as unset.
    """
    asked = getattr(generation_config, "num_assistant_tokens", None)
    if asked == GenerationConfig._get_default_generation_params()["num_assistant_tokens"]:
        asked = None
    return default_length(
        drafter,
        batch_size=batch_size,
        sampled=bool(generation_config.do_sample),
        asked=asked,
        compiled=compiled,
    )
