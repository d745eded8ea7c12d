"""Which of the prompts a target wrote are kept: each once, long enough, not repeating itself."""

from __future__ import annotations

import re
from collections import Counter

GRAM = 8
MOST_SEEN = 0.5
"""A text is like one before if so many of its runs of `GRAM` words were seen."""
FEWEST_WORDS = 3
MOST_REPETITION = 0.3
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")
"""Scripts that put no spaces between words (Thai, Khmer, Japanese, Chinese) are counted by their letters."""


class PromptSieve:
    """Admits a text once. `left_out` counts the others by reason."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self.left_out: Counter[str] = Counter()

    def admits(self, text: str) -> bool:
        """Whether `text` is kept; if so it counts as seen."""
        words, own = words_of(text), grams(text)
        objections = {
            "too short": len(words) < FEWEST_WORDS,
            "repeating themselves": repetition(words) > MOST_REPETITION,
            "like one before": sum(gram in self._seen for gram in own) >= MOST_SEEN * len(own),
        }
        reason = next((reason for reason, holds in objections.items() if holds), None)
        if reason is None:
            self._seen |= own
        else:
            self.left_out[reason] += 1
        return reason is None

    def told(self) -> str:
        """How many were left out, and why."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common()) or "none left out"


def words_of(text: str) -> list[str]:
    """Words and numbers in lower case."""
    return _WORD.findall(text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Runs of `GRAM` words; of a shorter text the whole."""
    words = words_of(text)
    return {tuple(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1))}


def repetition(words: list[str]) -> float:
    """Share of the runs of three words that stood before in the same text."""
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
