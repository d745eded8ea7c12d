"""Rows of a batch: texts as they are written, each choosing its tokens in its own way, and failing alone.

A text with a seed is chosen by noise of its own, by position, taken from a generator of its seed as plain `generate`
takes it: a seed writes the same text alone and in a crowd, with any drafts and none, and the one that `generate` writes
after `torch.manual_seed` of it, wherever the target's scores are the same (in half precision they are up to rounding).
A text without a seed takes noise of no seed, for many positions at once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..drafting.host_numbers import on_device
from ..drafting.shape import DraftShape
from ..loop.choosing import ChoiceRule, RoundBatch
from ..loop.prefill import PromptEnd
from ..sampling.callers_code import CallersCode
from ..sampling.draw import FreshNoise, PositionNoise
from ..sampling.grammar import GrammarProcessor
from ..sampling.logits_processing import ScoreProcessing
from ..sampling.seen_tokens import SeenTokens
from ..stats import SpeculationStats
from ..targets.binding import TargetBinding
from .text import OnEvent, Request, Sampling, TokenLogprob, Usage, Writer

logger = logging.getLogger(__name__)

NO_TOKEN = (
    "no token can be chosen: the model's scores are no numbers, or logit_bias, min_tokens and "
    "grammar together forbid every token, or the grammar is too large to be followed"
)


# --- how one text chooses ---------------------------------------------------------------------------------------------


class FailsAlone(ScoreProcessing):
    """Processors of one text, whose errors end no other.

    Attributes:
        failure: what one has raised, in words; empty if none has.
    """

    failure = ""

    def _of_row(self, row: int, ids: Tensor, scores: Tensor, code: CallersCode | None) -> Tensor:
        """Scores that are no numbers where a processor raises."""
        try:
            return super()._of_row(row, ids, scores, code)
        except Exception as error:
            logger.exception("eagle31: the scores of a text could not be processed")
            self.failure = f"{type(error).__name__}: {error}"
            return torch.full_like(scores, torch.nan)


class TokenChooser:
    """How one text chooses its tokens: the likeliest, or drawn by noise of its `seed`; `None`: of any.

    Attributes:
        kind: equal for texts that choose alike; `None` where each prefix has to be looked at.
    """

    def __init__(self, processors: LogitsProcessorList, *, draws: bool, seed: int | None = None):
        self.processing, self.draws, self.seed = FailsAlone(processors), draws, seed
        self.kind: Hashable = (draws, self.processing.draft_warping.key) if self.processing.warps_drafts else None
        self._noise: PositionNoise | FreshNoise | None = None

    @property
    def needs_seen(self) -> bool:
        """Whether the processors look at which tokens the text has, and at nothing else of it."""
        return self.kind is not None and not self.processing.scores_only

    def noise(self, vocabulary: int, device: torch.device) -> PositionNoise | FreshNoise:
        """With a seed as `generate` takes it after `manual_seed`."""
        if self._noise is None:
            generator = torch.Generator(device)
            if self.seed is None:
                generator.seed()
                self._noise = FreshNoise(vocabulary, device, generator)
            else:
                self._noise = PositionNoise(1, vocabulary, device, generator.manual_seed(self.seed))
        return self._noise


def choose_as_generate(model: Any, request: Request, *, device: torch.device) -> TokenChooser:
    """How `generate` of this target chooses, called with what the request sets and nothing else.

    The rest is the target's generation config's, and transformers builds the processors of both, for scores on this
    device.
    """
    config = _prepared(model, request.sampling)
    config._eos_token_tensor = torch.tensor(sorted(request.end_ids), device=device) if request.end_ids else None
    config.max_length = request.longest
    if request.min_new_tokens is not None:
        config.min_new_tokens = request.min_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = len(request.prompt) + config.min_new_tokens
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(request.prompt),
        encoder_input_ids=torch.tensor([request.prompt], device=device),
        logits_processor=LogitsProcessorList(_own_processors(request)),
        device=device,
        model_kwargs={},
    )
    return TokenChooser(processors, draws=bool(config.do_sample), seed=request.sampling.seed)


def _prepared(model: Any, sampling: Sampling) -> GenerationConfig:
    """As `generate` prepares it; what cannot be followed (`unfollowed`) is left out."""
    kwargs: dict[str, Any] = {name: getattr(sampling, name) for name in _OF_GENERATE}
    if sampling.temperature is not None:
        kwargs["do_sample"] = sampling.temperature > 0
    config = model._prepare_generation_config(None, **{k: v for k, v in kwargs.items() if v is not None})[0]
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


def _own_processors(request: Request) -> list[stock.LogitsProcessor]:
    """What requests ask for and `generate` has no argument for."""
    sampling, found = request.sampling, list[stock.LogitsProcessor]()
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        found.append(OccurrencePenalty(*penalties, len(request.prompt)))
    if sampling.logit_bias:
        found.append(stock.SequenceBiasLogitsProcessor([[[id], bias] for id, bias in sampling.logit_bias.items()]))
    if request.grammar is not None:
        found.append(GrammarProcessor(request.grammar, len(request.prompt)))
    return found


class OccurrencePenalty(stock.LogitsProcessor):
    """OpenAI's penalties: `presence` off each token written so far, `frequency` once more for each time it was."""

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)

    def fork_for_drafts(self) -> OccurrencePenalty:
        """Itself: it keeps no state."""
        return self


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ServedText:
    """One request on its way: it waits, its prompt is read, then it has a row of the batch.

    Attributes:
        on_event: told what each round brings.
        cancelled: its client has gone.
        writer, chooser: of its tokens, from when its prompt is read on.
        prompt_logprobs: of the prompt's tokens that were read, but for its first; only where they were asked for.
        prompt_end: from when its prompt has been read on.
    """

    request: Request
    on_event: OnEvent
    cancelled: bool = False
    writer: Writer = field(init=False)
    chooser: TokenChooser = field(init=False)
    usage: Usage = field(init=False)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_end: PromptEnd | None = None

    def __post_init__(self) -> None:
        self.usage = Usage(prompt_tokens=len(self.request.prompt))

    @property
    def tokens(self) -> list[int]:
        """Prompt and text."""
        return [*self.request.prompt, *self.writer.tokens]

    @property
    def held(self) -> HeldText:
        return HeldText(self.tokens, len(self.request.prompt), self.prompt_end)


class HeldText(NamedTuple):
    """What a row holds, for others to begin with: prompt and text, the prompt's length, and what lies at its end."""

    tokens: Sequence[int] = ()
    prompt_length: int = 0
    prompt_end: PromptEnd | None = None


class Rows:
    """The texts of a batch as rounds see them (`loop.choosing`, `Texts` and `Choosing`).

    Args:
        shape: the largest draft of a round.
        stats: told where drafts are made without a text's grammar.

    Attributes:
        texts: by place.
        checks: rounds say where scores are no numbers; else whoever writes the tokens has to look.
    """

    wants_scores, checks = False, True
    eos_ids: frozenset[int] = frozenset()  # writers see where texts end: drafts go on

    def __init__(self, binding: TargetBinding, shape: DraftShape, stats: SpeculationStats):
        self.texts: list[ServedText] = []
        self.shape, self.stats = shape, stats
        self.device = binding.input_device
        self._seen: tuple[list[ServedText], SeenTokens] | None = None  # of these texts
        self._scores = binding.text_config.vocab_size, binding.head_device  # how many of a row, and where

    @property
    def sequences(self) -> Rows:
        return self

    @property
    def new(self) -> list[list[int]]:
        return [text.writer.tokens for text in self.texts]

    def last_token(self, row: int) -> int:
        text = self.texts[row]
        return (text.writer.tokens or text.request.prompt)[-1]

    def remaining_tokens(self, row: int) -> int:
        return self.texts[row].writer.remaining

    def text(self, row: int) -> list[int]:
        """Prompt and new tokens."""
        return self.texts[row].tokens

    def identity(self, row: int) -> ServedText:
        """Which text this is; its place may become another's."""
        return self.texts[row]

    def prefix(self, row: int, drafted: Tensor) -> Tensor:
        return torch.cat((on_device(self.texts[row].tokens, self.device), drafted.to(self.device)))[None]

    def choice_rules(self, batch: RoundBatch) -> list[ChoiceRule]:
        """One for the rows of each kind, and for each row whose prefixes have to be looked at."""
        alike: dict[Hashable, list[int]] = {}
        for place, text in enumerate(self.texts):
            alike.setdefault(place if text.chooser.kind is None else text.chooser.kind, []).append(place)
        rows = [0] * len(self.texts)  # each text's processors know of one row
        firsts = [(places, self.texts[places[0]].chooser) for places in alike.values()]
        return [ChoiceRule(places, one.processing, one.draws, rows, fails_alone=self.checks) for places, one in firsts]

    def noise_for(self, batch: RoundBatch, count: int) -> Tensor | None:
        """Of greedy rows beside drawn ones it is 1, which changes no choice."""
        choosers = [text.chooser for text in self.texts]
        if not any(chooser.draws for chooser in choosers):
            return None
        vocabulary, device = self._scores

        def of_row(chooser: TokenChooser, start: int) -> Tensor:
            if chooser.draws:
                return chooser.noise(vocabulary, device).window([0], [start], count)
            return torch.ones((), device=device).expand(1, count, vocabulary)

        noise = [of_row(*each) for each in zip(choosers, batch.written, strict=True)]
        return noise[0] if len(noise) == 1 else torch.cat(noise)

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        if not any(text.chooser.needs_seen for text in self.texts):
            return None
        if self._seen is None or self._seen[0] != self.texts:
            prompts = [text.request.prompt for text in self.texts]
            pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
            ids = [[*[0] * pad, *prompt] for pad, prompt in zip(pads, prompts, strict=True)]
            vocabulary, device = self._scores
            self._seen = list(self.texts), SeenTokens(on_device(ids, device), vocabulary, pads)
        return self._seen[1].of(range(len(self.texts)), self.new)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Of tokens `(n,)` written after nodes of these `logits` `(n, V)`, and of the `top` likeliest beside each."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs[range(len(tokens)), list(tokens)].tolist()
    best = logprobs.topk(top, dim=-1)
    others = [tuple(zip(*each, strict=True)) for each in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return tuple(TokenLogprob(*each) for each in zip(tokens, own, others, strict=True))
