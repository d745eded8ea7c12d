"""Served acceptance on texts that are known: exact, paired, and without a pass of the target.

The target writes its texts once, as it is served (temperature, top-k, top-p as its generation config has them), and the
random numbers it sampled by can be made again. What a drafter would have got accepted along the texts follows from
passes of the drafter alone: a draft is kept where it is the text's token, chosen by the same noise as `generate` does.
No draw is left in the figures but the texts', which are the same for every drafter, so that differences of two drafters
are better known than either.

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
from ...drafter.propose import BARE_CHOICE, DraftChoice, grow_tree
from ...drafter.replay import TargetText, drafter_states, drafts_along, read_text, rows_of_ids
from ...drafter.session import DraftSession
from ...errors import ConfigurationError
from ...sampling.acceptance import accept_chosen
from ...sampling.draw import PositionNoise, argmax, perturbed, random_state
from ...sampling.logits_processing import DraftWarping, ScoreProcessing
from ...target.binding import TargetBinding
from ...target.served_processing import processing_of, sampling_options
from ...trees.shape import DraftShape
from ..data.padding import end_ids, generate_padded, until_end
from .evaluation import EvaluationPrompt


@dataclass(frozen=True, eq=False)
class SampledBatch:
    """Texts that `generate` sampled side by side."""

    state: Tensor  # of the generator before the first token
    rows: int  # rows, vocabulary, device: of the scores
    vocabulary: int
    device: torch.device

    def noise(self, row: int, count: int) -> Tensor:
        """`(count, V)` that the first tokens of a row were sampled by, made again."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return PositionNoise(self.rows, self.vocabulary, self.device, generator).window([row], [0], count)[0]


@dataclass(frozen=True)
class KnownText:
    """A text the target wrote, as it is served."""

    text: TargetText  # with the hidden states of the layers that drafters read
    category: str  # of its prompt
    # batch, row: the texts that were sampled together, and which of them it is; `None` of a greedy one
    batch: SampledBatch | None = None
    row: int = 0

    @property
    def num_rounds_tokens(self) -> int:
        """Tokens written in rounds: all but the first, `n - 1`."""
        return len(self.text.ids) - self.text.prompt_length - 1

    def noise(self, device: torch.device) -> Tensor | None:
        """Noise `(n, V)` that its tokens were sampled by; `None` of a greedy one."""
        if self.batch is None:
            return None
        return self.batch.noise(self.row, self.num_rounds_tokens + 1).to(device)


@dataclass(frozen=True)
class KnownTexts:
    """Texts of one temperature."""

    temperature: float  # 0 is greedy
    warping: DraftWarping  # what turns scores into the distribution that is served
    max_new_tokens: int  # most tokens of a text
    texts: tuple[KnownText, ...]  # of at least two written tokens each


@dataclass(frozen=True)
class TextRounds:
    """What one text takes with drafts of `K` levels."""

    category: str  # of its prompt
    tokens: int  # written in rounds
    rounds: int  # their number
    drafted_at: tuple[int, ...]  # drafted_at, accepted_at: per level, rounds that draft and accept it
    accepted_at: tuple[int, ...]


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
            state = random_state(binding.input_device)
            out = generate_padded(
                model,
                [prompt.input_ids for prompt in batch],
                max_new_tokens=max_new_tokens,
                **sampling_options(temperature),
            )
            longest = len(batch[-1].input_ids)
            sampled = None
            if temperature > 0:
                sampled = SampledBatch(state, len(batch), binding.text_config.vocab_size, binding.input_device)
            for row, (prompt, written) in enumerate(zip(batch, out[:, longest:].tolist(), strict=True)):
                answer = until_end(written, end_ids(model))
                if len(answer) > 1:
                    whole = torch.tensor([*prompt.input_ids, *answer], device=out.device)
                    text = read_text(binding, whole, len(prompt.input_ids), kept)
                    states = {layer: state.cpu() for layer, state in text.states.items()}  # a card is for training
                    on_cpu = TargetText(whole.cpu(), text.prompt_length, states)
                    found.append(KnownText(on_cpu, prompt.category, sampled, row))
            on_prompts(len(batch))
    if not found:
        raise ConfigurationError(f"the target ends its text at once behind all {len(prompts)} prompts; give others")
    return KnownTexts(temperature, warping, max_new_tokens, tuple(found))


@torch.no_grad()
def rounds_of(drafter: Eagle31Drafter, texts: KnownTexts, shape: DraftShape) -> list[TextRounds]:
    """What each text takes with an attached drafter.

    Args:
        shape: of the drafts: a chain of fixed length, or a dynamic tree.
    """
    assert not shape.min_confidence, "chains are of fixed length here"
    was_training = drafter.training
    drafter.eval()
    try:
        if shape.is_tree:
            return [_tree_rounds(drafter, known, texts, shape) for known in texts.texts]
        return [_chain_rounds(drafter, known, texts, shape.depth) for known in texts.texts]
    finally:
        drafter.train(was_training)


def _tree_rounds(drafter: Eagle31Drafter, known: KnownText, texts: KnownTexts, shape: DraftShape) -> TextRounds:
    """Round by round: a tree, how far the text follows it, and what the drafter then reads of the text."""
    text, device = known.text, drafter.device
    ids, last = text.ids.to(device), len(text.ids) - 1
    aux = drafter_states(drafter, text)
    session = DraftSession(
        drafter, batch_size=1, capacity=shape.drafter_capacity(len(ids)), block=shape.drafter_block(text.prompt_length)
    )
    session.absorb(ids[None, 1 : text.prompt_length + 1], aux[:, : text.prompt_length], [text.prompt_length])
    noise, warping = known.noise(device), texts.warping if texts.warping.key else None
    root, rounds, longest = text.prompt_length, 0, text.prompt_length + texts.max_new_tokens - 1
    drafted, accepted = [0] * shape.depth, [0] * shape.depth
    while root < last:
        cut = shape.cut_to(longest - root - 1)  # the target adds a token of its own
        kept = 0
        if cut.depth:
            choice = BARE_CHOICE
            if noise is not None:
                choice = DraftChoice(warping, _behind(noise, root - text.prompt_length + 1, cut.depth))
            tree = grow_tree(session.root, session.step, session.draft_ids, ids[root : root + 1], cut, choice)
            follows = ids[(root + 1 + tree.depths).clamp(max=last)]  # on the text's path; elsewhere it does not matter
            kept = min(int(accept_chosen(tree, follows).length) - 1, last - root)
        for level in range(cut.depth):
            drafted[level] += 1
            accepted[level] += level < kept
        rounds += 1
        count = min(kept + 1, last - root)
        session.absorb(ids[None, root + 1 : root + 1 + count], aux[:, root : root + count], [count])
        root += count
    return TextRounds(known.category, known.num_rounds_tokens, rounds, tuple(drafted), tuple(accepted))


def _behind(noise: Tensor, first: int, count: int) -> Tensor:
    """Noise `(1, count, V)` of the tokens from `y_first` on; behind the text's end, where nothing is kept, the last."""
    places = torch.arange(first, first + count, device=noise.device).clamp(max=len(noise) - 1)
    return noise[places][None]


@dataclass(frozen=True)
class KnownChains:
    """Chains of `K` drafts behind each of a text's `T` tokens that may be a round's root."""

    kept: Tensor  # `(T,)` drafts that a round which begins there keeps
    inside: Tensor  # `(T, K)` whether the text goes on so far
    # `(T, K)` the largest probability at each level, behind the text's own tokens; what a chain that ends in doubt asks
    # for
    sure: Tensor

    def roots(self) -> list[int]:
        """Where rounds begin that draft whole chains, one after the other."""
        found, place, kept = [], 0, self.kept.tolist()
        while place < len(kept):
            found.append(place)
            place += kept[place] + 1
        return found


@torch.no_grad()
def chains_along(drafter: Eagle31Drafter, known: KnownText, texts: KnownTexts, depth: int) -> KnownChains:
    """What chains of `depth` drafts of an attached drafter in evaluation mode come to along one of `texts`."""
    text, count = known.text, known.num_rounds_tokens  # roots y_0 .. y_{n-2}
    starts = torch.arange(text.prompt_length - 1, text.prompt_length - 1 + count)
    row_of, noise = rows_of_ids(drafter), known.noise(drafter.device)
    right, sure = [], []
    for step, draft in enumerate(drafts_along(drafter, text, starts, depth)):
        wanted = draft.truth if row_of is None else row_of[draft.truth]
        scores = texts.warping(draft.logits)
        if noise is not None:
            own = _behind(noise, 1 + step, count)[0]
            scores = perturbed(
                scores, own[:, : scores.shape[-1]] if drafter.draft_ids is None else own[:, drafter.draft_ids]
            )
        probs = scores.softmax(-1)
        right.append((argmax(probs) == wanted).cpu())
        sure.append(probs.amax(-1).cpu())
    place = torch.arange(count)[:, None] + torch.arange(depth)  # which of y_1, y_2, ... each draft answers for
    inside = place < min(count, texts.max_new_tokens - 2)  # the last token of a text cut short is the target's own
    kept = (torch.stack(right, 1) & inside).long().cumprod(1).sum(1)
    return KnownChains(kept, inside, torch.stack(sure, 1))


def _chain_rounds(drafter: Eagle31Drafter, known: KnownText, texts: KnownTexts, depth: int) -> TextRounds:
    chains = chains_along(drafter, known, texts, depth)
    roots = chains.roots()
    accepted = chains.kept[roots][:, None] > torch.arange(depth)  # (R, K)
    return TextRounds(
        category=known.category,
        tokens=known.num_rounds_tokens,
        rounds=len(roots),
        drafted_at=tuple(chains.inside[roots].sum(0).tolist()),
        accepted_at=tuple(accepted.sum(0).tolist()),
    )


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
