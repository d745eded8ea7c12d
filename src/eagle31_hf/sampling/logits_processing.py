"""The target's logits processors, applied to the nodes of a draft tree and to the drafter's own scores.

Processors fall into five kinds (tried out of order, repeated and row by row; transformers 5.17 and 5.23):

    scores only   temperature, top-k, top-p, ...    one call for all nodes of all rows
    seen tokens   repetition penalty                the same, with a mask of the text's tokens (`seen_tokens`)
    prefix        n-grams, shortest lengths, ...    a call per row and depth, on that node's own prefix
    row-bound     the encoder pair, ...             the same, through a view that knows the true row
    in order      grammars, SynthID, guidance, any  shown each prefix of the text once, one after the other, as plain
                  that transformers does not ship,  decoding does; never a draft. Of one row alone: they may keep one
                  prefix constraints                state for all
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from ..errors import blame_caller
from .callers_code import CallersCode
from .seen_tokens import penalize

SCORES_ONLY = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TopHLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
# Sound on a reduced vocabulary too: they look at each score's rank or mass, which -inf rows do not change.
RANKED_BY_SCORE = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
)
CALLS_THE_USERS_CODE = stock.PrefixConstrainedLogitsProcessor
STATEFUL = (
    stock.SynthIDTextWatermarkLogitsProcessor,
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    CALLS_THE_USERS_CODE,
)


class DraftWarping:
    """Processors that look at scores, and at which tokens the text has, for logits over any part of the vocabulary.

    Attributes:
        key: equal for processors that do the same.
        needs_seen: some ask which tokens the text has.
    """

    def __init__(self, processors: Sequence[Any]):
        self._processors = list(processors)
        self.key = tuple(
            (type(p).__name__, p.penalty) if _asks_what_was_seen(p) else (type(p).__name__, *sorted(vars(p).items()))
            for p in self._processors
        )
        self.needs_seen = any(_asks_what_was_seen(p) for p in self._processors)
        first = _top_k_that_compares_first(self._processors)
        self._top_k: int | None = None if first is None else first.top_k
        self._after_top_k = [processor for processor in self._processors if processor is not first]

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Float32 scores of logits `(B, Vd)`; `seen (B, Vd)` says which tokens each text has, where that is asked."""
        return self._run(self._processors, logits, seen)

    def of_nodes(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Float32 scores of logits `(B, N, V)`; `seen (B, N, V)`."""
        return self(logits.flatten(0, 1), None if seen is None else seen.flatten(0, 1)).view(logits.shape)

    @staticmethod
    def _run(processors: Sequence[Any], logits: Tensor, seen: Tensor | None) -> Tensor:
        scores = logits.float()
        for processor in processors:
            if _asks_what_was_seen(processor):
                assert seen is not None, "see `needs_seen`"
                scores = penalize(scores, seen, processor.penalty)
            else:
                scores = processor(torch.empty(0), scores)
        return scores

    def width(self, vocabulary: int, at_least: int = 1) -> int | None:
        """How many `candidates` there are, if that is less than the vocabulary."""
        return self._top_k if self._top_k is not None and at_least <= self._top_k < vocabulary else None

    def candidates(self, logits: Tensor, at_least: int = 1, seen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scores `(B, S)` of the tokens that may be drawn, and which these are, `(B, S)`; `None`: all of them.

        Where top-k comes before all that depends on other scores, nothing else is looked at. Of tokens that tie for the
        last place stock top-k keeps all and this only some: drafts may be drawn from any distribution that is known.

        Args:
            at_least: fewer candidates than this are filled up by all of the vocabulary.
            seen: as in a call.
        """
        width = self.width(logits.shape[-1], at_least)
        if width is None:
            return self(logits, seen), None
        likeliest, ids = logits.topk(width)
        return self._run(self._after_top_k, likeliest, None), ids


def _top_k_that_compares_first(processors: Sequence[Any]) -> stock.TopKLogitsWarper | None:
    """Top-k, if nothing before it looks at more than each score alone, and nothing at all at the text."""
    if any(_asks_what_was_seen(processor) for processor in processors):
        return None
    for processor in processors:
        if isinstance(processor, stock.TopKLogitsWarper):
            return processor
        if not isinstance(processor, stock.TemperatureLogitsWarper):
            return None
    return None


def _asks_what_was_seen(processor: Any) -> bool:
    """Whether which tokens the text has is all of the text that it looks at."""
    is_penalty = type(processor) is stock.RepetitionPenaltyLogitsProcessor
    return is_penalty and getattr(processor, "logits_indices", None) is None


class ScoreProcessing:
    """A prepared `LogitsProcessorList`, ready for trees.

    Args:
        processors: as `generate` prepared them.

    Attributes:
        scores_only: no processor looks at the text.
        fits_draft_vocabulary: nor at more than ranks and masses of scores, so that drafts may be warped alike.
        warps_drafts: the same but for a repetition penalty, which asks which tokens the text has.
        forks_no_more: set where copying has failed.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = list(processors)
        self.is_empty = not self.processors
        self.forks_no_more = False
        self.scores_only = all(type(p) in SCORES_ONLY for p in self.processors)
        self.fits_draft_vocabulary = all(type(p) in RANKED_BY_SCORE for p in self.processors)
        self._penalties = [p for p in self.processors if _asks_what_was_seen(p)]
        others = all(type(p) in RANKED_BY_SCORE or p in self._penalties for p in self.processors)
        self.warps_drafts = others and len(self._penalties) <= 1

    @cached_property
    def _moving(self) -> list[Any]:
        """Processors that must be shown the prefixes of the text alone, each once and in order."""
        return [p for p in self.processors if isinstance(p, STATEFUL) or not _is_stock(p)]

    def _moves(self, processor: Any) -> bool:
        return any(processor is each for each in self._moving)

    @property
    def in_order(self) -> list[str]:
        """Class names of processors that must be shown the prefixes of the text alone, each once and in order."""
        return [type(p).__name__ for p in self._moving]

    @property
    def can_fork(self) -> bool:
        """Whether some look at prefixes, and drafts may be shown to them: to copies of those that are `in_order`."""
        return not self.forks_no_more and not self.fits_draft_vocabulary and None not in self._ways_to_fork

    @cached_property
    def _ways_to_fork(self) -> list[Callable[[], Any] | None]:
        """Of the processors that are `in_order`."""
        return [_way_to_fork(each) for each in self._moving]

    def fork(self) -> ScoreProcessing:
        """The same processors, copies of those `in_order`: what these are shown the originals never see."""
        assert self.can_fork, "a processor keeps state that cannot be copied"
        ways = zip(self._moving, self._ways_to_fork, strict=True)
        copies = {id(each): fork() for each, fork in ways if fork is not None}
        return ScoreProcessing(LogitsProcessorList([copies.get(id(each), each) for each in self.processors]))

    @cached_property
    def draft_warping(self) -> DraftWarping:
        """Looks at no more than scores, and which tokens the text has: for all nodes at once, and where
        `warps_drafts` for the drafter's scores, too."""
        assert self.scores_only or self.warps_drafts, "these processors need the text"
        return DraftWarping(self.processors)

    def uncounted_tokens(self, batch_size: int) -> list[int]:
        """How many tokens of each row, from its first pad on, a repetition penalty leaves out."""
        ignored = self._penalties[0].prompt_ignore_length if self._penalties else None
        if isinstance(ignored, Tensor):  # one length per row since transformers 5.23
            return ignored.flatten().expand(batch_size).tolist()
        return [ignored or 0] * batch_size

    def row_scores(
        self, prefix: Callable[[int], Tensor], logits: Tensor, rows: Sequence[int], code: CallersCode | None = None
    ) -> Tensor:
        """Processed scores of one token per row, `(R, V)` float32.

        Args:
            prefix: `prefix(i)` gives the token ids `(1, t)` before it.
            logits: `(R, V)` raw, any float dtype.
            rows: the row of the whole batch that each is.
            code: asks processors that are `in_order`, and knows what they have said before.
        """
        if self.scores_only:
            return self.draft_warping(logits)
        one_by_one = logits.float().clone().split(1)  # processors may write on them
        made = [self._of_row(row, prefix(i), one_by_one[i], code) for i, row in enumerate(rows)]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _of_row(self, row: int, ids: Tensor, scores: Tensor, code: CallersCode | None) -> Tensor:
        """Processed scores of scores `(1, V)` behind a row's prefix `ids (1, t)`."""
        first = 0
        if code is not None and (made := code.processed.get(ids.shape[1])) is not None:
            first, scores = made[0], made[1].clone()
        for place, processor in enumerate(self.processors[first:], first):
            ask = partial(_ask, view_of_row(processor, row), ids, scores)
            if code is not None and self._moves(processor):
                scores = code.process(place, type(processor).__name__, ids, scores, ask)
            else:
                scores = ask()
        return scores


def _ask(processor: Any, ids: Tensor, scores: Tensor) -> Any:
    """Scores `(1, V)` behind `ids (1, t)`; what the caller's own code raises is marked as the caller's."""
    try:
        return processor(ids, scores)
    except Exception as error:
        if not _is_stock(processor) or isinstance(processor, CALLS_THE_USERS_CODE):
            blame_caller(error)
        raise


def _is_stock(processor: Any) -> bool:
    """Whether transformers ships it, and so whether it is known to look at nothing but its arguments."""
    return type(processor).__module__ == stock.__name__


def view_of_row(processor: Any, row: int) -> Any:
    """A processor that treats a one-row batch as row `row` of the whole one."""
    if isinstance(processor, stock.RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor) and ignored.numel() > 1:  # one length per row since transformers 5.23
            return _changed(processor, prompt_ignore_length=int(ignored.flatten()[row]))
    elif isinstance(processor, stock.EncoderRepetitionPenaltyLogitsProcessor):
        return _changed(processor, encoder_input_ids=processor.encoder_input_ids[row : row + 1])
    elif isinstance(processor, stock.EncoderNoRepeatNGramLogitsProcessor):
        return _changed(processor, batch_size=1, generated_ngrams=[processor.generated_ngrams[row]])
    return processor


def _changed(processor: Any, **attributes: Any) -> Any:
    view = copy.copy(processor)
    for name, value in attributes.items():
        setattr(view, name, value)
    return view


def processing_of(model: Any, **kwargs: Any) -> ScoreProcessing:
    """What `model.generate` makes of its generation config and of `kwargs`, beside prompts and lengths."""
    seen: list[Any] = []

    def note(_model: Any, input_ids: Tensor, logits_processor: Any, **_others: Any) -> Tensor:
        seen.append(logits_processor)
        return input_ids

    ids = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    ends = {"max_new_tokens": 1, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=note, **ends, **kwargs)
    return ScoreProcessing(seen[0])


def end_ids(model: Any) -> set[int]:
    """Tokens that end the target's texts, by its generation config."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, (list, tuple)) else [ends]) - {None}


def sampling_options(temperature: float) -> dict[str, Any]:
    """Arguments of `generate` for this temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}


# --- copies that are shown drafts -------------------------------------------------------------------------------------


def _way_to_fork(processor: Any) -> Callable[[], Any] | None:
    """What copies a processor that keeps state, so that drafts may be shown to the copy; `None`: nothing.

    A processor, or a `prefix_allowed_tokens_fn`, says so by a method `fork_for_drafts()`, which returns one in the same
    state that shares nothing changeable with it, or itself if it keeps no state. That of xgrammar is known here.
    """
    own = getattr(processor, "fork_for_drafts", None)
    if callable(own):
        return own
    kind = f"{type(processor).__module__}.{type(processor).__qualname__}"
    if kind == "xgrammar.contrib.hf.LogitsProcessor":
        return partial(_fork_of_xgrammar, processor)
    if isinstance(processor, stock.PrefixConstrainedLogitsProcessor):
        of_function = getattr(processor._prefix_allowed_tokens_fn, "fork_for_drafts", None)
        beams = processor._num_beams
        return (lambda: type(processor)(of_function(), beams)) if callable(of_function) else None
    return None


def _fork_of_xgrammar(processor: Any) -> Any:
    copied = copy.copy(processor)
    copied.matchers = [matcher.fork() for matcher in processor.matchers]
    if processor.token_bitmask is not None:
        copied.token_bitmask = processor.token_bitmask.clone()  # is written in place
    return copied
