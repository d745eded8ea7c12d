"""Served acceptance: what `generate` with the drafter accepts, measured by `generate` itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...drafter.drafter import Eagle31Drafter
from ...errors import TrainingError
from ...stats import SpeculationStats
from ...texts.conversations import Conversation, Message
from ..data.padding import left_padded, pad_token_id
from ..data.regeneration import sampling_options
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
    """How acceptance is measured, of greedy texts.

    Attributes:
        depth: draft tokens per round (a chain).
        max_new_tokens: most tokens per prompt.
        batch_size: prompts at a time.
    """

    depth: int = 5
    max_new_tokens: int = 128
    batch_size: int = 16


@dataclass
class AcceptanceCounts:
    """Sums over verification rounds.

    Attributes:
        rounds, accepted: rounds, and draft tokens accepted in them.
        drafted_at, accepted_at: per draft position, rounds that drafted and accepted it.
    """

    depth: int
    rounds: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted_at = self.drafted_at or [0] * self.depth
        self.accepted_at = self.accepted_at or [0] * self.depth

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass, bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def standard_error(self) -> float:
        """Of the acceptance length, taking rounds as independent."""
        if not self.rounds:
            return 0.0
        reached = [accepted / self.rounds for accepted in self.accepted_at]  # chance that i or more are accepted
        mean = sum(reached)
        mean_square = sum((2 * i + 1) * share for i, share in enumerate(reached))
        return math.sqrt(max(0.0, mean_square - mean**2) / self.rounds)

    @property
    def cumulative_acceptance(self) -> list[float]:
        """Share of the rounds that drafted position `i` in which it was accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def add(self, other: SpeculationStats | AcceptanceCounts) -> None:
        """Add another measurement's rounds."""
        self.rounds += other.rounds
        self.accepted += other.accepted
        for position, (drafted, accepted) in enumerate(zip(other.drafted_at, other.accepted_at, strict=True)):
            self.drafted_at[position] += drafted
            self.accepted_at[position] += accepted


def evaluation_prompts(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[EvaluationPrompt]:
    """Each conversation up to its last user message no later than `LAST_MESSAGE`.

    Raises:
        TrainingError: a conversation has no user message so early, or the template refuses it.
    """
    return [EvaluationPrompt(_prompt(conversation, tokenizer), conversation.category) for conversation in conversations]


def _prompt(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = conversation.messages if conversation.is_text else context_of(conversation)
    return prompt_ids(tokenizer, conversation, messages)


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
) -> dict[str, AcceptanceCounts]:
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
    found: dict[str, AcceptanceCounts] = {}
    done = 0
    try:
        for category in dict.fromkeys(prompt.category for prompt in prompts):
            # Prompts of like length share a batch, so that little of it is padding.
            chosen = sorted((p.input_ids for p in prompts if p.category == category), key=len)
            counts = found.setdefault(category, AcceptanceCounts(settings.depth))
            for start in range(0, len(chosen), settings.batch_size):
                batch = chosen[start : start + settings.batch_size]
                on_prompts(done, len(prompts))
                counts.add(_generate(drafter, batch, settings))
                done += len(batch)
    finally:
        config.num_assistant_tokens, config.draft_top_k = before
        drafter.train(was_training)
    return found


def _generate(drafter: Eagle31Drafter, prompts: list[list[int]], settings: EvaluationSettings) -> SpeculationStats:
    binding = drafter.require_binding()
    ids, mask = left_padded(prompts, binding.input_device)
    model: Any = binding.model
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        assistant_model=drafter,
        max_new_tokens=settings.max_new_tokens,
        pad_token_id=pad_token_id(model),
        **sampling_options(0.0),
    )
    assert drafter.stats is not None, "generate with our drafter leaves stats"
    return drafter.stats


def total(by_category: dict[str, AcceptanceCounts], depth: int) -> AcceptanceCounts:
    """The sum over categories."""
    summed = AcceptanceCounts(depth)
    for counts in by_category.values():
        summed.add(counts)
    return summed
