"""How long a call's drafts may get: asked by both loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..decoding.default_length import default_length
from ..drafter.assistant import Assistant
from ..generation_config import DraftLength

NAME = "num_assistant_tokens"
REMEMBERED = "_eagle31_num_assistant_tokens"


def remember_draft_tokens(
    prepared: GenerationConfig, kwargs: Mapping[str, Any], given: GenerationConfig | None, defaults: GenerationConfig
) -> None:
    """Keep what a call asks for: in `prepared` an unset `num_assistant_tokens` is transformers' default.

    Args:
        prepared: what `generate` makes of the others.
        kwargs: of the call, which come before `given`, its `generation_config`.
        defaults: the model's own.
    """
    asked = kwargs.get(NAME)
    for config in (given, defaults):
        if asked is None and config is not None:
            asked = getattr(config, REMEMBERED, getattr(config, NAME, None))
    setattr(prepared, REMEMBERED, asked)


def draft_length(
    drafter: Assistant, generation_config: GenerationConfig, *, batch_size: int, compiled: bool | None = None
) -> DraftLength:
    """How long drafts may get: what the `generate` call asks for, else the drafter's own settings."""
    return default_length(
        drafter,
        batch_size=batch_size,
        sampled=bool(generation_config.do_sample),
        asked=getattr(generation_config, REMEMBERED, getattr(generation_config, NAME, None)),
        compiled=compiled,
    )
