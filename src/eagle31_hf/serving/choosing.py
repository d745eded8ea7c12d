"""By what a text's tokens are chosen: greedy, sampled, penalised, constrained.

A text with a seed is chosen by noise of its own, by position, taken from a generator of its seed as plain `generate`
takes it: a seed writes the same text alone and in a crowd, with any drafts and none, and the one that `generate` writes
after `torch.manual_seed` of it, wherever the target's scores are the same (in half precision they are up to rounding).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from ..sampling.asked_once import AskedOnce
from ..sampling.draw import PositionNoise
from ..sampling.logits_processing import ScoreProcessing
from .requests import Sampling

logger = logging.getLogger(__name__)


class ScoreShape(NamedTuple):
    """Scores per row, `V`, and where they lie."""

    vocabulary: int
    device: torch.device


class FailsAlone(ScoreProcessing):
    """Processors of a text that end nobody else's where they raise.

    Attributes:
        failure: what one has raised, in words; empty if none has.
    """

    failure = ""

    def row_scores(
        self, prefix: Callable[[int], Tensor], scores: Tensor, rows: Sequence[int], asked: AskedOnce | None = None
    ) -> Tensor:
        """Each row by itself, scores that are no numbers where a processor raises."""
        return torch.cat([self._scores_of(prefix(b), scores[b : b + 1]) for b in range(len(rows))])

    def _scores_of(self, prefix: Tensor, scores: Tensor) -> Tensor:
        try:
            return super().row_scores(lambda _b: prefix, scores, [0])
        except Exception as error:
            logger.exception("eagle31: the scores of a text could not be processed")
            self.failure = f"{type(error).__name__}: {error}"
            return torch.full_like(scores, torch.nan, dtype=torch.float32)


class TokenChooser:
    """How one text chooses its tokens.

    Args:
        sampling: as asked for.
        prompt_length: tokens of its prompt.
        constraint: further processors that look at the prefix, such as a grammar's.

    Attributes:
        kind: equal for texts that choose alike; `None` where each prefix has to be looked at.
        draws: whether tokens are drawn, by noise.
        seed: of that; `None`: any noise will do (`shared_noise`).
    """

    def __init__(
        self, sampling: Sampling, prompt_length: int, constraint: Sequence[stock.LogitsProcessor] = ()
    ):  # fmt: skip
        processing = FailsAlone(_processors(sampling, prompt_length, constraint))
        self.processing, self.draws = processing, sampling.draws
        self.kind: Hashable = (self.draws, processing.draft_warping.key) if processing.warps_drafts else None
        self.seed = sampling.seed
        self._noise: PositionNoise | None = None

    @property
    def needs_seen(self) -> bool:
        """Whether which tokens the text has is all of it that is asked."""
        return self.kind is not None and not self.processing.scores_only

    def noise(self, position: int, count: int, scores: ScoreShape) -> Tensor:
        """`(count, V)` of the next positions of a text that is sampled by a seed.

        Args:
            position: new tokens before the first of them.
            scores: what it is for.
        """
        if self._noise is None:
            generator = torch.Generator(scores.device)
            assert self.seed is not None, "texts without one share theirs"
            generator.manual_seed(self.seed)
            self._noise = PositionNoise(1, scores.vocabulary, scores.device, generator)
        return self._noise.window([0], [position], count)[0]


def _processors(
    sampling: Sampling, prompt_length: int, constraint: Sequence[stock.LogitsProcessor]
) -> LogitsProcessorList:  # fmt: skip
    found: list[stock.LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        found.append(stock.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(OccurrencePenalty(sampling.presence_penalty, sampling.frequency_penalty, prompt_length))
    if sampling.logit_bias:
        found.append(TokenBias(sampling.logit_bias))
    found += constraint
    if sampling.draws:
        if sampling.temperature != 1.0:
            found.append(stock.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            found.append(stock.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            found.append(stock.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            found.append(stock.MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(found)


class OccurrencePenalty(stock.LogitsProcessor):
    """OpenAI's penalties: `presence` off each token written so far, `frequency` once more for each time it was."""

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Processed scores `(B, V)` after `input_ids` `(B, t)`."""
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)

    def fork_for_drafts(self) -> OccurrencePenalty:
        return self  # keeps no state


class TokenBias(stock.LogitsProcessor):
    """Adds to the scores of some tokens; -100 forbids one and 100 forces it."""

    def __init__(self, bias: dict[int, float]):
        self.ids, self.amounts = list(bias), list(bias.values())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Processed scores `(B, V)`."""
        changed = scores.clone()
        changed[:, self.ids] += torch.tensor(self.amounts, dtype=scores.dtype, device=scores.device)
        return changed

    def fork_for_drafts(self) -> TokenBias:
        return self  # keeps no state
