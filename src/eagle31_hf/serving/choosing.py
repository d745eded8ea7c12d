"""Which token a text goes on with, for rows that each want something else: greedy, sampled, penalised, constrained.

The target's own token is chosen after every node a text passes, and a draft is kept where it is that token
(`sampling.tree_walk`), so what is written never depends on what was drafted. A sampled text is chosen by noise of its
own, by position, taken from a generator of its seed as plain `generate` takes it: a seed writes the same text alone and
in a crowd, with any drafts and none, and the one that `generate` writes after `torch.manual_seed` of it, wherever the
target's scores are the same (in half precision they are up to rounding).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from ..sampling.draw import PositionNoise, choose
from ..sampling.logits_processing import ScoreProcessing
from ..sampling.tree_walk import walk
from ..trees.draft_tree import DraftTree
from ..trees.host_numbers import on_device
from .requests import Sampling

logger = logging.getLogger(__name__)


class ScoreShape(NamedTuple):
    """Scores per row, `V`, and where they lie."""

    vocabulary: int
    device: torch.device

    @classmethod
    def of(cls, scores: Tensor) -> ScoreShape:
        return cls(scores.shape[-1], scores.device)


class TokenChooser:
    """How one text chooses its tokens.

    Args:
        sampling: as asked for.
        prompt_length: tokens of its prompt.
        constraint: further processors that look at the prefix, such as a grammar's.

    Attributes:
        failure: what a processor raised, in words; empty if none has.
    """

    def __init__(
        self, sampling: Sampling, prompt_length: int, constraint: Sequence[stock.LogitsProcessor] = ()
    ):  # fmt: skip
        self.processing = ScoreProcessing(_processors(sampling, prompt_length, constraint))
        self.draws = sampling.draws
        self.failure = ""
        self._seed = sampling.seed
        self._noise: PositionNoise | None = None

    @property
    def kind(self) -> Hashable:
        """Equal for texts whose scores can be processed together; `None` where each prefix has to be looked at."""
        if not self.processing.scores_only:
            return None
        key = self.processing.draft_warping.key if self.processing.fits_draft_vocabulary else ()
        return (self.draws, key)

    def noise(self, position: int, count: int, scores: ScoreShape) -> Tensor:
        """`(count, V)` of the next positions of a text that is sampled.

        Args:
            position: new tokens before the first of them.
            scores: what it is for.
        """
        if self._noise is None:
            generator = torch.Generator(scores.device)
            generator.seed() if self._seed is None else generator.manual_seed(self._seed)
            self._noise = PositionNoise(1, scores.vocabulary, scores.device, generator)
        return self._noise.window([0], [position], count)[0]

    def choose(self, prefix: Tensor, logits: Tensor, position: int) -> int:
        """The token at `position` of the text, after `prefix` `(1, t)`, by the target's `logits` `(1, V)`.

        `V` where none can be chosen: the scores are no numbers, every token is forbidden, or a processor has raised,
        which is this text's affair and not that of those beside it.
        """
        try:
            scores = self.processing.row_scores(lambda _b: prefix, logits, [0])
        except Exception as error:
            logger.exception("eagle31: the scores of a text could not be processed")
            self.failure = f"{type(error).__name__}: {error}"
            return logits.shape[-1]
        chosen = choose(scores, self.noise(position, 1, ScoreShape.of(scores))) if self.draws else _likeliest(scores)
        return int(chosen)


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


# --- a batch ----------------------------------------------------------------------------------------------------------

Prefix = Callable[[int, Sequence[int]], Tensor]
"""Token ids `(1, t)` of a row and some drafted tokens."""


class Verdict(NamedTuple):
    """Accepted nodes of each row, the root first, and the tokens that it gets."""

    paths: list[list[int]]
    emitted: list[list[int]]


def accept_drafts(
    tree: DraftTree, logits: Tensor, choosers: Sequence[TokenChooser], written: Sequence[int], prefix: Prefix
) -> Verdict:
    """What each row accepts of its drafts, and the target's token after that. Waits for the device once, and again for
    rows that are asked one by one.

    Args:
        tree: drafts of `B` rows.
        logits: the target's `(B, N, V)`.
        choosers: of each row.
        written: new tokens of each row so far.
        prefix: asked only for rows whose scores depend on it.
    """
    groups = list(_alike(choosers).values())
    chosen = [
        _choose_after_all_nodes(
            _rows_of(tree.depths, rows),
            _rows_of(logits, rows),
            [choosers[row] for row in rows],
            [written[row] for row in rows],
        )
        for rows in groups
    ]
    num_rows = len(choosers)
    told = torch.cat((tree.tokens, tree.parents, *chosen)).tolist()
    tokens, parents = told[:num_rows], told[num_rows : 2 * num_rows]
    asked_at_once = [row for rows in groups for row in rows]
    at_once = dict(zip(asked_at_once, told[2 * num_rows :], strict=True))

    def choose_after(row: int, path: Sequence[int]) -> int:
        ids = prefix(row, [tokens[row][node] for node in path[1:]])
        return choosers[row].choose(ids, logits[row, path[-1]][None], written[row] + len(path) - 1)

    def choose(rows: Sequence[int], paths: Sequence[list[int]]) -> list[int]:
        return [
            at_once[row][path[-1]] if row in at_once else choose_after(row, path)
            for row, path in zip(rows, paths, strict=True)
        ]

    paths, bonus = walk(tokens, parents, tree.max_depth + 1, choose, range(num_rows))
    emitted = [[*(row[node] for node in path[1:]), last] for row, path, last in zip(tokens, paths, bonus, strict=True)]
    return Verdict(paths, emitted)


def _rows_of(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor if rows == list(range(len(tensor))) else tensor[on_device(rows, tensor.device)]


def _alike(choosers: Sequence[TokenChooser]) -> dict[Hashable, list[int]]:
    """Rows whose scores are processed alike, by kind; not those that must be asked one by one."""
    groups: dict[Hashable, list[int]] = {}
    for row, chooser in enumerate(choosers):
        if chooser.kind is not None:
            groups.setdefault(chooser.kind, []).append(row)
    return groups


def _choose_after_all_nodes(
    depths: Tensor, logits: Tensor, choosers: Sequence[TokenChooser], written: Sequence[int]
) -> Tensor:
    """The target's token after every node of rows of one kind, `(R, N)`; nothing waits for the device."""
    if not choosers[0].draws:
        return _likeliest(logits)
    scores = choosers[0].processing.node_scores(logits, lambda b, node: logits, range(len(choosers)))
    noise = noise_of(choosers, written, logits.shape[1], ScoreShape.of(scores))  # no node is deeper
    return choose(scores, noise[torch.arange(len(depths), device=depths.device)[:, None], depths])


def _likeliest(scores: Tensor) -> Tensor:
    """Index of the largest of each row, `(..., V)` -> `(...)`; `V`, as `choose` has it, where none is a number."""
    best = scores.max(-1)
    return best.indices.masked_fill(~(best.values > float("-inf")), scores.shape[-1])


# --- drafts -----------------------------------------------------------------------------------------------------------


def noise_of(choosers: Sequence[TokenChooser], written: Sequence[int], count: int, scores: ScoreShape) -> Tensor:
    """Noise `(B, count, V)` of each row's next tokens; of greedy ones it is 1, which changes no choice.

    Args:
        written: new tokens of each row so far.
        scores: what it is for.
    """
    greedy = torch.ones((), device=scores.device).expand(count, scores.vocabulary)
    return torch.stack(
        [
            chooser.noise(at, count, scores) if chooser.draws else greedy
            for chooser, at in zip(choosers, written, strict=True)
        ]
    )


def warp_rows(scores: Tensor, choosers: Sequence[TokenChooser]) -> Tensor:
    """Draft scores `(B, S)` by the temperature, top-k, top-p, min-p of sampled rows that have no other processors."""
    for rows in _alike(choosers).values():
        processing = choosers[rows[0]].processing
        if choosers[rows[0]].draws and processing.fits_draft_vocabulary and not processing.is_empty:
            index = torch.tensor(rows, device=scores.device)
            scores = scores.index_copy(0, index, processing.draft_warping(scores[index]))
    return scores
