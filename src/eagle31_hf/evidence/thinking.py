"""Which rounds fell inside `<think>`: drafters trained on answers alone are often accepted less there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .calls import TextPart

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ThinkMarks:
    """Ids of the two marks."""

    open: tuple[int, ...]
    close: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> ThinkMarks | None:
        """A tokenizer's, if both are tokens of their own; `None` for those that only spell them."""
        ids = [tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (OPEN, CLOSE)]
        return cls(*ids) if all(len(mark) == 1 for mark in ids) else None


def split_rounds(
    blocks: Sequence[int], answer: Sequence[int], prompt: Sequence[int], marks: ThinkMarks | None
) -> tuple[TextPart, TextPart]:
    """Rounds inside and outside thinking, told by where a round's first token stands.

    Args:
        blocks: tokens of each round; the answer's first token came before them.
        answer, prompt: ids; a template may have opened the thinking.
        marks: `None`: everything is outside.
    """
    inside = _inside(answer, prompt, marks)
    parts, place = {True: TextPart(), False: TextPart()}, 1
    for block in blocks:
        where = inside[min(place, len(inside) - 1)] if inside else False
        parts[where] += TextPart(1, block)
        place += block
    return parts[True], parts[False]


def _inside(answer: Sequence[int], prompt: Sequence[int], marks: ThinkMarks | None) -> list[bool]:
    """For each token of the answer whether it is thought; the closing mark still is."""
    if marks is None:
        return [False] * len(answer)
    thinks = False
    for token in prompt:
        thinks = token in marks.open or (thinks and token not in marks.close)
    inside = []
    for token in answer:
        thinks = thinks or token in marks.open
        inside.append(thinks)
        thinks = thinks and token not in marks.close
    return inside
