"""What the doctor examines, and what it says: one finding a check, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...demo import Messages
from ...drafter.drafter import Eagle31Drafter

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check, and what to do about it, if anything.

    A `"problem"` makes the pair work worse than it could, or not at all; a `"note"` is worth knowing.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Patient:
    """An attached drafter, its target's tokenizer, and chats to examine them with.

    Attributes:
        encode: a conversation to `input_ids` and `attention_mask` `(1, L)` on the target's device.
        folder: of the drafter's files, where its evidence may lie; `None` if it is not a folder.
    """

    drafter: Eagle31Drafter
    tokenizer: Any
    conversations: Sequence[Messages]
    encode: Callable[[Messages], dict[str, Tensor]]
    folder: Path | None = None
