"""Copies of logits processors that keep state: drafts are shown to the copy, and the processor itself never moves.

A processor, or a `prefix_allowed_tokens_fn`, says by itself how it is copied, by a method `fork_for_drafts()` that
returns one in the same state that shares nothing changeable with it; whoever keeps no state may return itself. Those of
xgrammar and outlines are known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, full_like
from transformers.generation import logits_process as stock

Fork = Callable[[], Any]


def can_fork(processor: Any) -> bool:
    """Whether drafts may be shown to a copy of it."""
    return _way_to_fork(processor) is not None


def fork_all(processors: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
    """The same list, with copies of those that are `moving`; all of these `can_fork`."""
    return [_fork(each) if any(each is one for one in moving) else each for each in processors]


def _fork(processor: Any) -> Any:
    way = _way_to_fork(processor)
    assert way is not None, "can_fork comes first"
    return way()


def _way_to_fork(processor: Any) -> Fork | None:
    own = getattr(processor, "fork_for_drafts", None)
    if callable(own):
        return own
    kind = f"{type(processor).__module__}.{type(processor).__qualname__}"
    if kind == "xgrammar.contrib.hf.LogitsProcessor":
        forkable = all(hasattr(matcher, "fork") for matcher in processor.matchers)
        return partial(_fork_of_xgrammar, processor) if forkable else None
    if kind == "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor":
        return partial(_fork_of_outlines, processor) if hasattr(processor.index, "get_next_state") else None
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


def _fork_of_outlines(processor: Any) -> _AlongIndex:
    begun = not processor.is_first_token
    return _AlongIndex(processor.index, processor._guides[0].get_state() if begun else None)


class _AlongIndex:
    """What outlines' processor allows one text, looked up in its index: its guides cannot be copied.

    Args:
        index: of `outlines_core`, never changed.
        state: where the guide is; `None`: it has been shown nothing yet.
    """

    def __init__(self, index: Any, state: int | None):
        self._index, self._state = index, state

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `(1, V)` after `input_ids` `(1, t)`, one token longer than those of the call before."""
        if self._state is None:
            self._state = self._index.get_initial_state()
        else:
            state = self._index.get_next_state(self._state, int(input_ids[0, -1]))
            assert state is not None, "a draft outside the grammar"
            self._state = state
        masked, allowed = full_like(scores, float("-inf")), self._index.get_allowed_tokens(self._state)
        masked[:, allowed] = scores[:, allowed]
        return masked
