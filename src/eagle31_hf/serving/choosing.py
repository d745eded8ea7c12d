"""By what a text's tokens are chosen: greedy, sampled, penalised, constrained.

A text with a seed is chosen by noise of its own, by position, taken from a generator of its seed as plain `generate`
takes it: a seed writes the same text alone and in a crowd, with any drafts and none, and the one that `generate` writes
after `torch.manual_seed` of it, wherever the target's scores are the same (in half precision they are up to rounding).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..sampling.asked_once import AskedOnce
from ..sampling.draw import PositionNoise
from ..sampling.logits_processing import ScoreProcessing
from .grammar import GrammarProcessor
from .requests import Sampling, TextRequest

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
        processors: of its scores.
        draws: whether tokens are drawn, by noise, instead of taking the likeliest.
        seed: of the noise; `None`: any noise will do (`shared_noise`).

    Attributes:
        kind: equal for texts that choose alike; `None` where each prefix has to be looked at.
    """

    def __init__(self, processors: LogitsProcessorList, *, draws: bool, seed: int | None = None):
        self.processing, self.draws, self.seed = FailsAlone(processors), draws, seed
        self.kind: Hashable = (draws, self.processing.draft_warping.key) if self.processing.warps_drafts else None
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


def choose_as_generate(
    model: Any, request: TextRequest, *, device: torch.device, eos_ids: frozenset[int] = frozenset()
) -> TokenChooser:
    """How `generate` of this target chooses, called with what the request sets and nothing else.

    Args:
        model: the target: its generation config has the rest, and transformers builds the processors of both.
        device: of the scores.
        eos_ids: tokens that end the target's texts.
    """
    config = _prepared(model, request.sampling)
    ends = sorted(request.end_ids(eos_ids))
    config._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
    config.max_length = request.longest
    if request.min_new_tokens is not None:
        config.min_new_tokens = request.min_new_tokens
    if request.bad_words:
        config.bad_words_ids = [*(config.bad_words_ids or ()), *map(list, request.bad_words)]
    prompt = torch.tensor([request.prompt], device=device)
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(request.prompt),
        encoder_input_ids=prompt,
        logits_processor=LogitsProcessorList(_own_processors(request, eos_ids)),
        device=device,
        model_kwargs={},
    )
    return TokenChooser(processors, draws=bool(config.do_sample), seed=request.sampling.seed)


def _prepared(model: Any, sampling: Sampling) -> GenerationConfig:
    """As `generate` prepares it; what cannot be followed (`unfollowed`) is left out."""
    kwargs: dict[str, Any] = {name: getattr(sampling, name) for name in _OF_GENERATE}
    if sampling.temperature is not None:
        kwargs["do_sample"] = sampling.temperature > 0
    set_ones = {name: value for name, value in kwargs.items() if value is not None}
    config = model._prepare_generation_config(None, **set_ones)[0]
    if config.min_p == 0.0:
        config.min_p = None  # removes nothing, and takes a pass over the scores
    for name, neutral in _UNFOLLOWED.items():
        setattr(config, name, next(iter(neutral), None))
    return config


_OF_GENERATE = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
_UNFOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "guidance_scale": (1,), "penalty_alpha": (0,), "max_time": (), "stop_strings": (),
    "token_healing": (False,), "dola_layers": (), "constraints": (), "force_words_ids": (),
}  # fmt: skip
"""Settings of generation configs that are no matter of a text's scores, and the values that ask for nothing."""


def unfollowed(config: GenerationConfig) -> list[str]:
    """Settings of a target's generation config that texts which are served side by side do not follow."""
    values = {name: getattr(config, name, None) for name in _UNFOLLOWED}
    return [name for name, value in values.items() if value is not None and value not in _UNFOLLOWED[name]]


def _own_processors(request: TextRequest, eos_ids: frozenset[int]) -> list[stock.LogitsProcessor]:
    """What requests ask for and `generate` has no argument for."""
    sampling, found = request.sampling, list[stock.LogitsProcessor]()
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        found.append(OccurrencePenalty(*penalties, len(request.prompt)))
    if sampling.logit_bias:
        found.append(TokenBias(sampling.logit_bias))
    if request.grammar is not None:
        found.append(GrammarProcessor(request.grammar, len(request.prompt), eos_ids))
    if request.allowed_tokens:
        found.append(OnlyTokens(request.allowed_tokens))
    return found


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


class OnlyTokens(stock.LogitsProcessor):
    """Forbids all tokens but these."""

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Processed scores `(B, V)`."""
        kept = torch.full_like(scores, float("-inf"))
        kept[:, self.ids] = scores[:, self.ids]
        return kept

    def fork_for_drafts(self) -> OnlyTokens:
        return self  # keeps no state
