"""Copies of logits processors that keep state: drafts are shown to the copy, and the processor itself never moves.

A processor, or a `prefix_allowed_tokens_fn`, says by itself how it is copied, by a method `fork_for_drafts()` that
returns one in the same state that shares nothing changeable with it, or itself if it keeps no state. That of xgrammar
is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
