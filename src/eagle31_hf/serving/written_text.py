"""A text while it is written in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .choosing import TokenChooser
from .requests import TextRequest, TextUsage, TokenLogprob
from .text import TextWriter

NO_TOKEN = (
    "no token can be chosen: the model's scores are no numbers, or logit_bias, allowed_token_ids, min_tokens and "
    "grammar together forbid every token, or the grammar is too large to be followed"
)


@dataclass(eq=False)
class WrittenText:
    """A text being written in the batch.

    Attributes:
        request: what was asked for.
        writer: tokens so far, and where they end.
        chooser: how the next one is chosen.
        usage: counts so far.
    """

    request: TextRequest
    writer: TextWriter
    chooser: TokenChooser
    usage: TextUsage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = TextUsage(prompt_tokens=len(self.request.prompt))

    @property
    def last_token(self) -> int:
        return self.writer.tokens[-1] if self.writer.tokens else self.request.prompt[-1]

    @property
    def tokens(self) -> list[int]:
        """Prompt and text."""
        return [*self.request.prompt, *self.writer.tokens]


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Of tokens `(n,)` written after nodes of these `logits` `(n, V)`, and of the `top` likeliest beside each."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs[range(len(tokens)), list(tokens)].tolist()
    best = logprobs.topk(top, dim=-1) if top else None
    others: list[tuple[tuple[int, float], ...]] = [()] * len(tokens) if best is None else [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]  # fmt: skip
    return tuple(TokenLogprob(*each) for each in zip(tokens, own, others, strict=True))
