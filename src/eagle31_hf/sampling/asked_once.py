"""What was said of a text's prefixes in a round that may have to be repeated, because memory ran out in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class AskedOnce:
    """Answers kept until the text has grown past them, so that nobody who keeps state is shown a prefix twice.

    A token chosen after such an answer stays as well: the prefix it makes may have been shown already.

    Attributes:
        scores: `(1, V)` a processor returned, by row, tokens of the prefix, and place among the processors.
        tokens: chosen after a prefix, by row and tokens of the prefix.
    """

    scores: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    def answer(self, key: tuple[int, int, int], ask: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """What `ask` makes of `scores`, or has made of them before."""
        if key in self.scores:
            return self.scores[key].clone()
        kept = torch.empty_like(scores)  # first: once it has been asked, nothing may fail
        answer = ask(scores)
        self.scores[key] = kept.copy_(answer)  # the answer itself may be written on, by others or by who gave it
        return answer

    def choose(self, row: int, length: int, token: int) -> int:
        """`token`, or the one that was chosen after this prefix before."""
        return self.tokens.setdefault((row, length), token)

    def forget_before(self, row: int, length: int) -> None:
        """Let go what was said of prefixes of fewer tokens."""
        self.scores = {key: known for key, known in self.scores.items() if key[0] != row or key[1] >= length}
        self.tokens = {key: token for key, token in self.tokens.items() if key[0] != row or key[1] >= length}
