"""The drafter after some positions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftState(NamedTuple):
    """What the drafter says of some positions' next tokens, logits `(B, T, Vd)`, and what it feeds back to itself,
    `(B, T, H)`."""

    logits: Tensor
    feedback: Tensor
