"""A pair and what it is examined with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..drafter.drafter import Eagle31Drafter
from .drift import Messages


@dataclass(frozen=True)
class Patient:
    """A pair and what it is examined with.

    Attributes:
        drafter: attached.
        tokenizer: the target's.
        conversations: chats that end with a user's message.
        encode: a conversation to `input_ids` and `attention_mask` `(1, L)` on the target's device.
        folder: of the drafter's files, where its evidence may lie; `None` if it is not a folder.
    """

    drafter: Eagle31Drafter
    tokenizer: Any
    conversations: Sequence[Messages]
    encode: Callable[[Messages], dict[str, Tensor]]
    folder: Path | None = None
