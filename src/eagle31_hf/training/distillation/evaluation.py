"""Served acceptance: what `generate` with the drafter accepts, measured by `generate` itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...drafter.drafter import Eagle31Drafter
from ...errors import TrainingError
from ...stats import Acceptance
from ...target.served_processing import sampling_options
from ...texts.rows import Conversation, Message
from ..data.padding import generate_padded
from ..data.rendering import prompt_ids

LAST_MESSAGE = 4
"""Prompts end with the last user message no later than this one, so that long dialogues do not set the figures."""


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt to draft for: `input_ids`, and the `category` its figures are reported under."""

    input_ids: list[int]
    category: str


@dataclass(frozen=True)
class EvaluationSettings:
    """How acceptance is measured, of greedy texts."""

    depth: int = 5  # draft tokens per round (a chain)
    max_new_tokens: int = 128  # most tokens per prompt
    batch_size: int = 16  # prompts at a time


def evaluation_prompts(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[EvaluationPrompt]:
    """Each conversation up to its last user message no later than `LAST_MESSAGE`.

    Raises:
        TrainingError: a conversation has no user message so early, or the template refuses it.
    """
    prompts = []
    for conversation in conversations:
        messages = conversation.messages if conversation.is_text else context_of(conversation)
        prompts.append(EvaluationPrompt(prompt_ids(tokenizer, conversation, messages), conversation.category))
    return prompts


def context_of(conversation: Conversation) -> list[Message]:
    """The messages up to the last user message no later than `LAST_MESSAGE`."""
    users = [i for i, message in enumerate(conversation.messages) if message["role"] == "user" and i <= LAST_MESSAGE]
    if not users:
        raise TrainingError(
            f"{conversation.id} has no user message among its first {LAST_MESSAGE + 1}; mend or remove it"
        )
    return list(conversation.messages[: users[-1] + 1])


@torch.no_grad()
def measure_acceptance(
    drafter: Eagle31Drafter,
    prompts: Sequence[EvaluationPrompt],
    settings: EvaluationSettings,
    on_prompts: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Acceptance]:
    """Acceptance by category: `generate` drafts a chain of `settings.depth` for every prompt.

    The drafter's own run-time settings are put back afterwards.

    Args:
        on_prompts: called with (prompts done, prompts in all) before each batch.
    """
    config = drafter.generation_config
    was_training = drafter.training
    before = (config.num_assistant_tokens, config.draft_top_k)
    config.num_assistant_tokens, config.draft_top_k = settings.depth, 1
    drafter.eval()
    found: dict[str, Acceptance] = {}
    done = 0
    try:
        for category in dict.fromkeys(prompt.category for prompt in prompts):
            # Prompts of like length share a batch, so that little of it is padding.
            chosen = sorted((p.input_ids for p in prompts if p.category == category), key=len)
            told = []
            for start in range(0, len(chosen), settings.batch_size):
                batch = chosen[start : start + settings.batch_size]
                on_prompts(done, len(prompts))
                options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, **sampling_options(0.0)}
                generate_padded(drafter.binding.model, batch, assistant_model=drafter, **options)
                told.append(drafter.stats)
                done += len(batch)
            found[category] = Acceptance.of(told)
    finally:
        config.num_assistant_tokens, config.draft_top_k = before
        drafter.train(was_training)
    return found
