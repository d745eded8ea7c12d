"""Acceptance on texts that are known: exact, paired, and without a pass of the target.

The target writes its texts once, as it is served (temperature, top-k, top-p as its generation config has them), and the
random numbers it sampled by can be made again. What a drafter would have got accepted along the texts follows from
passes of the drafter alone: a draft is kept where it is the text's token, chosen by the same noise as `generate` does.
No draw is left in the figures but the texts', which are the same for every drafter, so that differences of two drafters
are better known than either.

`n` written tokens `y_0, y_1, ...` behind a prompt; the target's first pass writes `y_0`, rounds the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..drafter.drafter import Eagle31Drafter
from ..drafter.replay import TargetText, drafts_along, read_text, rows_of_ids
from ..errors import ConfigurationError, TrainingError
from ..sampling.draw import PositionNoise, argmax, perturbed
from ..sampling.logits_processing import DraftWarping, processing_of, sampling_options
from ..stats import Acceptance
from ..targets.binding import TargetBinding
from ..texts.rows import FIRST_MESSAGES, Conversation, up_to_question
from .data import prompt_ids
from .writing import OnProgress, write_batch

SERVED_BY = ("bos_token_id", "eos_token_id", "pad_token_id", "temperature", "top_k", "top_p", "min_p")
"""What is left of a target's generation config in texts that acceptance is told from."""


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt to draft for: `input_ids`, and the `category` its figures are reported under."""

    input_ids: list[int]
    category: str


def evaluation_prompts(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[EvaluationPrompt]:
    """Each conversation up to an early question."""
    prompts = []
    for conversation in conversations:
        messages = list(conversation.messages)
        if not conversation.is_text and not (messages := up_to_question(messages, FIRST_MESSAGES)):
            raise TrainingError(
                f"{conversation.id} has no user message among its first {FIRST_MESSAGES}; mend or remove it"
            )
        prompts.append(EvaluationPrompt(prompt_ids(tokenizer, conversation, messages), conversation.category))
    return prompts


@dataclass(frozen=True)
class KnownText:
    """A text of at least two tokens that the target wrote, as it is served at one temperature."""

    text: TargetText  # with the hidden states of the layers that drafters read
    category: str  # of its prompt
    warping: DraftWarping  # what turns scores into the distribution that is served
    is_cut: bool  # whether it has as many tokens as were allowed: the last one is the target's own
    noise: Callable[[], Tensor] | None = None  # makes the noise `(n, V)` it was sampled by again; `None`: it is greedy


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def served_by_scores(model: Any) -> Iterator[None]:
    """Within, the target's generation config has nothing that looks at more than scores.

    Acceptance cannot be told without the target where its processors look at the text (a repetition penalty, say).
    """
    before = model.generation_config
    kept = {name: getattr(before, name, None) for name in SERVED_BY}
    model.generation_config = GenerationConfig(**{name: value for name, value in kept.items() if value is not None})
    try:
        yield
    finally:
        model.generation_config = before


def served_warping(model: Any, temperature: float) -> DraftWarping:
    """What turns scores into the distribution that is served, by processors that look at scores alone."""
    with served_by_scores(model):
        return processing_of(model, **sampling_options(temperature)).draft_warping


def readers_of_text(model: Any, temperature: float) -> str:
    """Names of the processors that `model.generate` would apply, if one looks at more than scores; else empty."""
    served = processing_of(model, **sampling_options(temperature))
    return "" if served.fits_draft_vocabulary else ", ".join(type(each).__name__ for each in served.processors)


def write_texts(
    binding: TargetBinding,
    prompts: Sequence[EvaluationPrompt],
    temperature: float,
    *,
    max_new_tokens: int,
    seed: int = 0,
    batch_size: int = 16,
    on_progress: OnProgress = lambda ended, underway: None,
) -> list[KnownText]:
    """Let the target answer `prompts` without a drafter, and read its answers once.

    Args:
        binding: of the target; its drafter's layers are kept.
        seed: of what is drawn.
    """
    warping = served_warping(binding.model, temperature)
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))  # so that little of a batch is padding
    texts: list[KnownText] = []
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        with served_by_scores(binding.model):
            answers = write_batch(
                binding.model,
                [prompt.input_ids for prompt in batch],
                seed=seed + first,
                max_new_tokens=max_new_tokens,
                on_token=partial(on_progress, 0),
                **sampling_options(temperature),
            )
        on_progress(len(batch), 0.0)
        for row, (prompt, answer) in enumerate(zip(batch, answers, strict=True)):
            if len(answer) > 1:
                sampled = (seed + first, len(batch), row, len(answer))
                noise = partial(_noise, binding, *sampled) if temperature > 0 else None
                text, is_cut = _read(binding, prompt.input_ids, answer), len(answer) == max_new_tokens
                texts.append(KnownText(text, prompt.category, warping, is_cut, noise))
    if not texts:
        raise ConfigurationError(f"the target ends its text at once behind all {len(prompts)} prompts; give others")
    return texts


def _noise(binding: TargetBinding, seed: int, rows: int, row: int, count: int) -> Tensor:
    """What the first `count` tokens of one of the rows that `generate` wrote side by side were sampled by."""
    generator = torch.Generator(binding.input_device).manual_seed(seed)
    noise = PositionNoise(rows, binding.text_config.vocab_size, binding.input_device, generator)
    return noise.window([row], [0], count)[0]


@torch.no_grad()
def _read(binding: TargetBinding, prompt: list[int], answer: list[int]) -> TargetText:
    """In main memory: a card's is for training."""
    ids = torch.tensor([*prompt, *answer], device=binding.input_device)
    text = read_text(binding, ids, len(prompt), binding.aux_layers)
    return TargetText(text.ids.cpu(), len(prompt), {layer: state.cpu() for layer, state in text.states.items()})


# --- drafting ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def acceptance_along(drafter: Eagle31Drafter, texts: Sequence[KnownText], depth: int) -> dict[str, Acceptance]:
    """What an attached drafter that drafts chains of `depth` gets accepted along these texts, by kind of prompt."""
    kinds: dict[str, Acceptance] = {}
    was_training = drafter.training
    drafter.eval()
    try:
        for known in texts:
            rounds = _rounds(chains_along(drafter, known, depth))
            kinds[known.category] = Acceptance.of((kinds.get(known.category), rounds))
    finally:
        drafter.train(was_training)
    return kinds


class KnownChains(NamedTuple):
    """Chains of `K` drafts behind each of a text's `T` tokens that may be a round's root."""

    kept: Tensor  # `(T,)` drafts that a round which begins there keeps
    inside: Tensor  # `(T, K)` whether the text goes on so far
    sure: Tensor  # `(T, K)` the largest probability at each level, behind the text's own tokens


def _rounds(chains: KnownChains) -> Acceptance:
    """Rounds that draft whole chains, one after the other."""
    roots, place, kept = [], 0, chains.kept.tolist()
    while place < len(kept):
        roots.append(place)
        place += kept[place] + 1
    drafted_at = chains.inside[roots].sum(0).tolist()
    accepted_at = (chains.kept[roots][:, None] > torch.arange(chains.inside.shape[1])).sum(0).tolist()
    return Acceptance(len(roots), sum(drafted_at), len(kept) - len(roots), drafted_at, accepted_at)


@torch.no_grad()
def chains_along(drafter: Eagle31Drafter, known: KnownText, depth: int) -> KnownChains:
    """What chains of `depth` drafts of an attached drafter in evaluation mode come to along a text."""
    text = known.text
    count = len(text.ids) - text.prompt_length - 1  # tokens written in rounds, and roots: y_0 .. y_{n-2}
    starts = torch.arange(text.prompt_length - 1, text.prompt_length - 1 + count)
    row_of = rows_of_ids(drafter)
    noise = None if known.noise is None else known.noise().to(drafter.device)
    right, sure = [], []
    for step, draft in enumerate(drafts_along(drafter, text, starts, depth)):
        wanted = row_of[draft.truth]
        scores = known.warping(draft.logits)
        if noise is not None:  # of y_1, y_2, ...; behind the text's end, where nothing is kept, the last
            own = noise[torch.arange(1 + step, 1 + step + count).clamp(max=len(noise) - 1)]
            drawn = slice(scores.shape[-1]) if drafter.draft_ids is None else drafter.draft_ids
            scores = perturbed(scores, own[:, drawn])
        probs = scores.softmax(-1)
        right.append((argmax(probs) == wanted).cpu())
        sure.append(probs.amax(-1).cpu())
    place = torch.arange(count)[:, None] + torch.arange(depth)  # which of y_1, y_2, ... each draft answers for
    inside = place < count - known.is_cut
    kept = (torch.stack(right, 1) & inside).long().cumprod(1).sum(1)
    return KnownChains(kept, inside, torch.stack(sure, 1))
