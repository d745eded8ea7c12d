"""The drafter after some positions: what it says of their next tokens, and what it feeds back to itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NextTokenProbs(NamedTuple):
    """Distribution of one next token: `probs` `(B, V)` float32, the largest of them and its id, `(B,)` each."""

    probs: Tensor
    largest: Tensor
    argmax: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> NextTokenProbs:
        """From logits or scores `(B, V)`."""
        probs = logits.softmax(-1, dtype=torch.float32)
        return cls(probs, *probs.max(-1))


class DraftState(NamedTuple):
    """The drafter after some positions.

    Attributes:
        logits: `(B, T, Vd)` of their next tokens.
        feedback: `(B, T, H)`.
        known: what follows a single position, if the step has computed it already.
    """

    logits: Tensor
    feedback: Tensor
    known: NextTokenProbs | None = None

    @property
    def next_token(self) -> NextTokenProbs:
        """What follows the first position."""
        return NextTokenProbs.of(self.logits[:, 0]) if self.known is None else self.known
