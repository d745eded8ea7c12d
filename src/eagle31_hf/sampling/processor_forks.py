"""Copies of logits processors that keep state: drafts are shown to the copy, and the processor itself never moves.

A processor says by itself how it is copied, by a method `fork_for_drafts()` that returns a processor in the same state
that shares nothing changeable with it. xgrammar's, whose matchers can be forked, is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

_OF_XGRAMMAR = ("xgrammar.contrib.hf", "LogitsProcessor")


def can_fork(processor: Any) -> bool:
    """Whether drafts may be shown to a copy of it."""
    if callable(getattr(processor, "fork_for_drafts", None)):
        return True
    return _is_of_xgrammar(processor) and all(hasattr(matcher, "fork") for matcher in processor.matchers)


def fork(processor: Any) -> Any:
    """The copy; only if `can_fork`."""
    return _fork_of_xgrammar(processor) if _is_of_xgrammar(processor) else processor.fork_for_drafts()


def fork_all(processors: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
    """The same list, with copies of those that are `moving`."""
    return [fork(each) if any(each is one for one in moving) else each for each in processors]


def _is_of_xgrammar(processor: Any) -> bool:
    kind = type(processor)
    return (kind.__module__, kind.__qualname__) == _OF_XGRAMMAR


def _fork_of_xgrammar(processor: Any) -> Any:
    copied = copy.copy(processor)
    copied.matchers = [matcher.fork() for matcher in processor.matchers]
    if processor.token_bitmask is not None:
        copied.token_bitmask = processor.token_bitmask.clone()  # is written in place
    return copied
