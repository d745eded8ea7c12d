"""A `generate` call written by plain decoding, one token at a time, also one that our loop had to leave.

Processors and criteria may keep state, so none is asked again what it has answered: of a text that is begun again,
tokens that were written are chosen again without asking, and answers of the round that was left are given from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from ..loop.carried_cache import forget_other_text
from ..loop.decoder import DecodingRequest
from ..sampling.callers_code import Processed, set_states
from ..stats import SpeculationStats
from .call import Call, with_stats


def write_plain(call: Call, stats: SpeculationStats) -> Any:
    """What `generate` writes without a drafter; a prompt that is read in pieces would be rotated in several ways."""
    if call.may_rotate_otherwise:
        call.generation_config.prefill_chunk_size = None
    if call.cache is not None and call.text_length == call.input_ids.shape[1]:
        forget_other_text(call.cache, call.input_ids, call.drafter.binding.text_config)
    counting = CountingCriteria(call.stopping_criteria)
    output: Any = GenerationMixin._sample(
        call.model,
        call.input_ids,  # type: ignore[arg-type]
        logits_processor=call.logits_processor,
        stopping_criteria=counting,
        generation_config=call.generation_config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_inputs,
    )
    stats.new_tokens = counting.new_tokens
    return with_stats(output, stats)


class CountingCriteria(StoppingCriteriaList):
    """The same criteria, which count new tokens on the way: a row that waits, filled up with pads, gets none."""

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        # As `_sample` has it: rows wait for the others at an end-of-sequence token, and without one all write on.
        self._rows_wait = any(hasattr(rule, "eos_token_id") for rule in criteria)
        self._ended = torch.tensor(False)
        self._new_tokens = torch.tensor(0)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Which rows `(B,)` end with their last token."""
        ends: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        ended = self._ended.to(ends.device).expand_as(ends)
        waiting = ended if self._rows_wait else ended.all().expand_as(ends)
        self._new_tokens = self._new_tokens.to(ends.device) + (~waiting).sum()
        self._ended = ended | ends
        return ends

    @property
    def new_tokens(self) -> int:
        """Written so far, summed over rows; waits for the device."""
        return int(self._new_tokens)


# --- begun again ------------------------------------------------------------------------------------------------------


def begun_again(call: Call, request: DecodingRequest, shown: int) -> Call:
    """The call as plain decoding gets it; torch's generators are as they were before the text.

    Args:
        request: of our loop, as it was left.
        shown: tokens that the streamer has been shown.
    """
    assert request.code is not None, "it has noticed something"
    set_states(request.code.begin)
    callers = call.rules.of_the_caller
    criteria = [rule for rule in call.stopping_criteria if not any(rule is each for each in callers)]
    return replace(
        call,
        logits_processor=LogitsProcessorList([_WrittenAgain(call.logits_processor, request)]),
        stopping_criteria=StoppingCriteriaList([*criteria, *([_Continued(callers, request)] if callers else [])]),
        streamer=None if call.streamer is None else _Behind(call.streamer, shown),
    )


def asked_ahead(request: DecodingRequest) -> bool:
    """Whether processors that keep state were shown tokens that may not come, since a criterion has drawn before."""
    known, code, drew = _known_length(request), request.code, request.sequences.drew
    return code is not None and drew is not None and any(length > known for _, length in code.processed)


def _known_length(request: DecodingRequest) -> int:
    """Tokens of the text that were written, prompt included; of a batch, the prompts."""
    sequences = request.sequences
    return sequences.prompts.shape[1] if sequences.batch_size > 1 else sequences.length(0)


class _WrittenAgain(LogitsProcessor):
    """All processors, none of which is asked what it was asked by our loop: tokens that were written are written again,
    by their scores if those are wanted."""

    def __init__(self, processors: LogitsProcessorList, request: DecodingRequest):
        self.processors, self.request, self.known = processors, request, _known_length(request)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:  # type: ignore[override]
        if input_ids.shape[1] < self.known:
            return self._written(input_ids.shape[1], scores)
        if not any(self._known_of(row, ids) for row, ids in enumerate(input_ids)):
            return self.processors(input_ids, scores)  # type: ignore[arg-type]
        rows = range(len(input_ids))
        return torch.cat([self._of_row(row, input_ids[row], scores[row : row + 1]) for row in rows])

    def _of_row(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        known, processing = self._known_of(row, ids), self.request.processing
        if known is None:
            return processing.of_row(row, ids[None], scores)
        if known.after is not None:
            set_states(known.after)
        return processing.of_row(row, ids[None], known.scores, first=known.place)

    def _known_of(self, row: int, ids: Tensor) -> Processed | None:
        """What our loop has heard of this prefix; nothing where the text went on otherwise behind what was written."""
        assert self.request.code is not None, "see begun_again"
        known = self.request.code.processed.get((row, len(ids)))
        return known if known is not None and torch.equal(known.ids[0], ids) else None

    def _written(self, length: int, scores: Tensor) -> Tensor:
        sequences = self.request.sequences
        place, kept = length - sequences.prompts.shape[1], sequences.scores[0]
        if place < len(kept):
            return kept[place][None].clone()
        certain = torch.full_like(scores, float("-inf"))
        certain[:, sequences.new[0][place]] = 0.0
        return certain


class _Continued(StoppingCriteria):
    """Criteria of the caller's: of what was written they are not asked again."""

    def __init__(self, rules: Sequence[Any], request: DecodingRequest):
        self.rules, self.drew, self.known = rules, request.sequences.drew, _known_length(request)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        length, ends = input_ids.shape[1], False
        if length > self.known:
            return StoppingCriteriaList(self.rules)(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        if length == self.known and self.drew is not None and self.drew.after is not None:
            set_states(self.drew.after)
            ends = self.drew.value
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)


class _Behind:
    """A streamer that is shown what comes behind the first tokens."""

    def __init__(self, streamer: Any, shown: int):
        self.streamer, self.shown = streamer, shown

    def put(self, value: Tensor) -> None:
        """One token of each row, `(B,)`."""
        self.shown -= 1
        if self.shown < 0:
            self.streamer.put(value)

    def end(self) -> None:
        """As plain decoding calls it."""
        self.streamer.end()
