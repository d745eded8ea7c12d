"""Served acceptance on texts that are known: exact, paired, and without a pass of the target.

The target writes its texts once, as it is served (temperature, top-k, top-p as its generation config has them). What a
drafter would have got accepted along them follows from passes of the drafter alone. Chains: at temperature 0 draft by
draft, at others in expectation over what might have been drawn (`sampling.expected_rounds`). Dynamic trees hold the
likeliest tokens at any temperature, and the target's own draw is followed down them, so the text says what is accepted:
they are drafted round by round. No draw is left in the figures but the texts', which are the same for every drafter, so
that differences of two drafters are better known than either.

`n` written tokens `y_0, y_1, ...` behind a prompt; the target's first pass writes `y_0`, rounds the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...drafter.drafter import Eagle31Drafter
from ...drafter.propose import propose_dynamic_tree
from ...drafter.replay import TargetText, drafter_states, drafts_along, read_text, rows_of_ids
from ...drafter.session import DraftSession
from ...errors import ConfigurationError
from ...sampling.acceptance import accept_greedy
from ...sampling.draw import argmax
from ...sampling.expected_rounds import chance_kept, expected_visits
from ...sampling.logits_processing import DraftWarping, ScoreProcessing
from ...target.binding import TargetBinding
from ...target.served_processing import processing_of
from ...trees.shape import DraftShape
from ..data.padding import left_padded, pad_token_id
from ..data.regeneration import sampling_options
from .evaluation import EvaluationPrompt


@dataclass(frozen=True)
class KnownText:
    """A text the target wrote, as it is served.

    Attributes:
        text: with the hidden states of the layers that drafters read.
        category: of its prompt.
        log_probs: `(n - 1,)` log-probability the target gave to `y_1, y_2, ...`; zeros at temperature 0.
    """

    text: TargetText
    category: str
    log_probs: Tensor


@dataclass(frozen=True)
class KnownTexts:
    """Texts of one temperature.

    Attributes:
        temperature: 0 is greedy.
        warping: what turns scores into the distribution that is served.
        max_new_tokens: most tokens of a text.
        texts: of at least two written tokens each.
    """

    temperature: float
    warping: DraftWarping
    max_new_tokens: int
    texts: tuple[KnownText, ...]


@dataclass(frozen=True)
class TextRounds:
    """What one text takes with drafts of `K` levels.

    Attributes:
        category: of its prompt.
        tokens: written in rounds.
        rounds: expected number.
        drafted_at, accepted_at: per level, expected rounds that draft and accept it.
    """

    category: str
    tokens: int
    rounds: float
    drafted_at: tuple[float, ...]
    accepted_at: tuple[float, ...]


def served_processing(model: Any, temperature: float) -> ScoreProcessing:
    """The processors that `model.generate` would apply at this temperature.

    Raises:
        ConfigurationError: the target's generation config asks for some that look at more than scores.
    """
    processing = processing_of(model, **sampling_options(temperature))
    if not processing.fits_draft_vocabulary:
        names = ", ".join(type(processor).__name__ for processor in processing.processors)
        raise ConfigurationError(
            f"the target is served with {names}; acceptance on known texts can be told under temperature, top-k, top-p "
            "and min-p alone: take the others out of its generation config, or measure with generate"
        )
    return processing


@torch.no_grad()
def write_texts(
    binding: TargetBinding,
    prompts: Sequence[EvaluationPrompt],
    temperature: float,
    *,
    max_new_tokens: int,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    batch_size: int = 16,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> KnownTexts:
    """Let the target answer `prompts` without a drafter, and read its answers once.

    Args:
        binding: of the target.
        layers: `hs` indices to keep; default: those the binding's drafter reads.
        seed: of what is drawn.
        on_prompts: called with the number of prompts done since the last call.

    Raises:
        ConfigurationError: see `served_processing`; or nothing was written behind any prompt.
    """
    model: Any = binding.model
    warping = served_processing(model, temperature).draft_warping
    kept = tuple(layers or binding.aux_layers)
    found: list[KnownText] = []
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))  # so that little of a batch is padding
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for first in range(0, len(ordered), batch_size):
            batch = ordered[first : first + batch_size]
            ids, mask = left_padded([prompt.input_ids for prompt in batch], binding.input_device)
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad_token_id(model),
                **sampling_options(temperature),
            )
            for prompt, answer in zip(batch, out[:, ids.shape[1] :], strict=True):
                answer = _until_end(answer, model)
                if len(answer) > 1:
                    whole = torch.cat((torch.tensor(prompt.input_ids, device=answer.device), answer))
                    text = read_text(binding, whole, len(prompt.input_ids), kept, logits_to_keep=len(answer))
                    found.append(_known(text, prompt.category, temperature, warping))
            on_prompts(len(batch))
    if not found:
        raise ConfigurationError(f"the target ends its text at once behind all {len(prompts)} prompts; give others")
    return KnownTexts(temperature, warping, max_new_tokens, tuple(found))


def _until_end(answer: Tensor, model: Any) -> Tensor:
    ends = model.generation_config.eos_token_id
    ended = torch.isin(answer, answer.new_tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends]))
    return answer[: int(ended.int().argmax()) + 1] if bool(ended.any()) else answer


def _known(text: TargetText, category: str, temperature: float, warping: DraftWarping) -> KnownText:
    assert text.logits is not None, "they were asked for"
    written = text.ids[text.prompt_length + 1 :]  # y_1, y_2, ...
    log_probs = torch.zeros(len(written))
    if temperature > 0:
        scores = warping(text.logits[:-1]).log_softmax(-1)  # the last position says what would follow the text
        log_probs = scores.gather(1, written.to(scores.device)[:, None]).squeeze(1).cpu()
    states = {layer: state.cpu() for layer, state in text.states.items()}  # a card's memory is for training
    return KnownText(TargetText(text.ids.cpu(), text.prompt_length, states), category, log_probs)


@torch.no_grad()
def rounds_of(drafter: Eagle31Drafter, texts: KnownTexts, shape: DraftShape) -> list[TextRounds]:
    """What each text takes with an attached drafter.

    Args:
        shape: of the drafts: a chain of fixed length, or a dynamic tree.
    """
    assert shape.static is None, "trees are dynamic here"
    assert not shape.min_confidence, "chains are of fixed length here"
    was_training = drafter.training
    drafter.eval()
    try:
        if shape.is_tree:
            return [_tree_rounds(drafter, known, texts.max_new_tokens, shape) for known in texts.texts]
        return [_chain_rounds(drafter, known, texts, shape.depth) for known in texts.texts]
    finally:
        drafter.train(was_training)


def _tree_rounds(drafter: Eagle31Drafter, known: KnownText, max_new_tokens: int, shape: DraftShape) -> TextRounds:
    """Round by round: a tree, how far the text follows it, and what the drafter then reads of the text."""
    text, device = known.text, drafter.device
    ids, last = text.ids.to(device), len(text.ids) - 1
    aux = drafter_states(drafter, text)
    session = DraftSession(
        drafter, batch_size=1, capacity=shape.drafter_capacity(len(ids)), block=shape.drafter_block(text.prompt_length)
    )
    session.absorb(ids[None, 1 : text.prompt_length + 1], aux[:, : text.prompt_length], [text.prompt_length])
    root, rounds, longest = text.prompt_length, 0, text.prompt_length + max_new_tokens - 1
    drafted, accepted = [0] * shape.depth, [0] * shape.depth
    while root < last:
        cut = shape.cut_to(longest - root - 1)  # the target adds a token of its own
        kept = 0
        if cut.depth:
            tree = propose_dynamic_tree(session, ids[root : root + 1], cut)
            follows = ids[(root + 1 + tree.depths).clamp(max=last)]  # on the text's path; elsewhere it does not matter
            kept = min(int(accept_greedy(tree, follows).length) - 1, last - root)
        for level in range(cut.depth):
            drafted[level] += 1
            accepted[level] += level < kept
        rounds += 1
        count = min(kept + 1, last - root)
        session.absorb(ids[None, root + 1 : root + 1 + count], aux[:, root : root + count], [count])
        root += count
    return TextRounds(known.category, len(known.log_probs), float(rounds), tuple(drafted), tuple(accepted))


@dataclass(frozen=True)
class KnownChains:
    """Chains of `K` drafts behind each of a text's `T` tokens that may be a round's root.

    Attributes:
        kept: `(T, K)` chance that a round keeps drafts up to the k-th (`sampling.expected_rounds`); 0 behind the end.
        inside: `(T, K)` whether the text goes on so far.
        sure: `(T, K)` the drafter's largest probability at each level, behind the text's own tokens; what a chain that
            ends in doubt asks for.
    """

    kept: Tensor
    inside: Tensor
    sure: Tensor


@torch.no_grad()
def chains_along(drafter: Eagle31Drafter, known: KnownText, texts: KnownTexts, depth: int) -> KnownChains:
    """What chains of `depth` drafts of an attached drafter in evaluation mode come to along one of `texts`."""
    text = known.text
    count = len(known.log_probs)  # roots y_0 .. y_{n-2}
    starts = torch.arange(text.prompt_length - 1, text.prompt_length - 1 + count)
    row_of = rows_of_ids(drafter)
    given, sure = [], []
    for draft in drafts_along(drafter, text, starts, depth):
        wanted = draft.truth if row_of is None else row_of[draft.truth]
        log_probs = texts.warping(draft.logits).log_softmax(-1)
        given.append(_of_rows(log_probs, wanted, is_greedy=texts.temperature == 0).cpu())
        sure.append(log_probs.amax(-1).exp().cpu())
    place = torch.arange(count)[:, None] + torch.arange(depth)  # which of y_1, y_2, ... each draft answers for
    inside = place < count
    draft_log_probs = torch.stack(given, 1).masked_fill(~inside, -math.inf)
    kept = chance_kept(draft_log_probs, known.log_probs[place.clamp(max=count - 1)])
    return KnownChains(kept, inside, torch.stack(sure, 1))


def _chain_rounds(drafter: Eagle31Drafter, known: KnownText, texts: KnownTexts, depth: int) -> TextRounds:
    chains = chains_along(drafter, known, texts, depth)
    visits = expected_visits(chains.kept)
    return TextRounds(
        category=known.category,
        tokens=len(known.log_probs),
        rounds=float(visits.sum()),
        drafted_at=tuple((visits[:, None] * chains.inside).sum(0).tolist()),
        accepted_at=tuple((visits[:, None] * chains.kept).sum(0).tolist()),
    )


def _of_rows(log_probs: Tensor, wanted: Tensor, *, is_greedy: bool) -> Tensor:
    """`(S,)` log-probability to draft these rows `(S,)` of the draft head, -1 cannot be; `log_probs` `(S, Vd)`."""
    if is_greedy:
        drafted = argmax(log_probs) == wanted
        return torch.zeros(len(wanted), device=log_probs.device).masked_fill(~drafted, -math.inf)
    found = log_probs.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
    return found.masked_fill(wanted < 0, -math.inf)


# --- figures ----------------------------------------------------------------------------------------------------------


def acceptance_length(rounds: Sequence[TextRounds]) -> float:
    """Tokens per round over all texts."""
    return sum(text.tokens for text in rounds) / sum(text.rounds for text in rounds)


def paired_error(rounds: Sequence[TextRounds], other: Sequence[TextRounds] | None = None) -> float:
    """Standard error of an acceptance length over prompts, or of its difference from another drafter's on them.

    By linearisation: what each text contributes to the quotient of sums.
    """
    parts = _contributions(rounds)
    if other is not None:
        parts = parts - _contributions(other)
    return float(parts.std()) / math.sqrt(len(parts)) if len(parts) > 1 else math.inf


def served_length(by_temperature: Sequence[Sequence[TextRounds]]) -> float:
    """Geometric mean of the acceptance lengths at several temperatures: each counts by its own scale."""
    return math.exp(sum(math.log(acceptance_length(rounds)) for rounds in by_temperature) / len(by_temperature))


def served_error(
    by_temperature: Sequence[Sequence[TextRounds]], others: Sequence[Sequence[TextRounds]] | None = None
) -> float:
    """Standard error of `served_length`, or of its difference from another drafter's on the same texts."""
    relative = [
        paired_error(rounds, others[place] if others else None) / acceptance_length(rounds)
        for place, rounds in enumerate(by_temperature)
    ]
    return served_length(by_temperature) * math.hypot(*relative) / len(by_temperature)


def _contributions(rounds: Sequence[TextRounds]) -> Tensor:
    tokens, taken = torch.tensor([(text.tokens, text.rounds) for text in rounds], dtype=torch.float64).T
    return (tokens - acceptance_length(rounds) * taken) / taken.mean()
