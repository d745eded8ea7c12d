"""What was said of a text's prefixes in a round that may have to be repeated, because memory ran out in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .callers_code import Answer, CallersCode, NotFollowedError, States, why_not_followed


@dataclass
class AskedOnce:
    """Answers kept until the text has grown past them, so that nobody who keeps state is shown a prefix twice.

    A token chosen after such an answer stays as well: the prefix it makes may have been shown already.

    Attributes:
        code: asks processors, and notices what they do; `None`: they are asked as they are.
        drew: which answer, if one could not be followed, and the generators' states behind it.
        scores: `(1, V)` a processor returned, by row, tokens of the prefix, and place among the processors.
        tokens: chosen after a prefix, by row and tokens of the prefix.
    """

    code: CallersCode | None = None
    drew: tuple[tuple[int, int, int], States | None] | None = None
    scores: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    def answer(
        self, key: tuple[int, int, int], ask: Callable[[Tensor], Tensor], scores: Tensor, name: str
    ) -> Tensor:  # fmt: skip
        """What `ask` makes of `scores`, or has made of them before.

        Raises:
            NotFollowedError: the processor called `name` does what only plain decoding can follow; its answer is kept.
        """
        if key in self.scores:
            return self.scores[key].clone()
        kept = torch.empty_like(scores)  # first: once it has been asked, nothing may fail
        answer = Answer(ask(scores), None) if self.code is None else self.code.ask(key[1], lambda: ask(scores))
        why = why_not_followed(name, kept, answer)
        if why:
            self.scores[key], self.drew = answer.value, (key, answer.after)
            raise NotFollowedError(why)
        self.scores[key] = kept.copy_(answer.value)  # it may be written on, by others or by what gave it
        return answer.value

    def choose(self, row: int, length: int, token: int) -> int:
        """`token`, or the one that was chosen after this prefix before."""
        return self.tokens.setdefault((row, length), token)

    def forget_before(self, row: int, length: int) -> None:
        """Let go what was said of prefixes of fewer tokens."""
        self.scores = {key: known for key, known in self.scores.items() if key[0] != row or key[1] >= length}
        self.tokens = {key: token for key, token in self.tokens.items() if key[0] != row or key[1] >= length}
